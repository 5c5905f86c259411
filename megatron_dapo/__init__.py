"""DAPO (arXiv 2503.14476) on Megatron-Core, SGLang and Ray."""

__version__ = "0.1.0"
