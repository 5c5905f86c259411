"""`megatron-dapo report`: any number of runs as a single HTML page that needs no network and runs no script."""
