"""New weights into servers: where they go, what travels, and the checksums that prove it."""

LOADER = "rollout.weights.changes.load"
"""For SGLang's `--custom-weight-loader`: takes changes alone."""
