"""Tested code: a sandbox that can compute and answer and nothing else, and tests that never share a process with it."""

READS = "REWARD_CODE_READS"
"""Variable of a worker that holds `reward.code_reads`, as PATH holds folders."""
