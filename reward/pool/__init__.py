"""Verdicts from worker processes that may be killed."""
