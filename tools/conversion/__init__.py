"""Hugging Face folders and Megatron distributed checkpoints, one into the other; see tools/convert_checkpoint.py."""
