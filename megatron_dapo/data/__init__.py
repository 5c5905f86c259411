"""Prompt files, templates, the prompt order and the ledger of what became of every prompt."""
