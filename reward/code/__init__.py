"""Tested code: a sandbox that can compute and answer and nothing else, and tests that never share a process with it."""
