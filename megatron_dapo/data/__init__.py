"""Prompt files, templates, tokenizers and the order of prompts."""
