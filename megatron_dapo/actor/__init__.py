"""The trainer: a Hugging Face model in Megatron-Core, its layout over ranks, its weights in and out.

`megatron_dapo.actor.device.prepare` comes first in a process: it must run before Megatron is imported, and most other
modules of this package import Megatron.
"""
