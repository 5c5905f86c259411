"""Verdicts on responses: extraction, equivalence, a killable worker pool. Imports nothing else of the project."""
