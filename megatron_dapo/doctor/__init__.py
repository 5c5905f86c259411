"""Whether this machine can run a config: one line a check, with the fix where something is wrong."""
