"""Slurm: the batch script of a run, and what it starts on each node."""
