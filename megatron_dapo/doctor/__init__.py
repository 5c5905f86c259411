"""Whether this machine can run a config: one line a check, with the mend where something is wrong."""
