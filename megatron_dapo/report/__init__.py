"""`megatron-dapo report`: one or two runs as a single HTML page that needs no network and runs no script."""
