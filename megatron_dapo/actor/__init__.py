"""The trainer: a Hugging Face model in Megatron-Core, its layout over ranks, its weights in and out.

`megatron_dapo.actor.device.prepare` comes first in a process: it must run before Megatron is imported, and importing any
other module of this package imports Megatron.
"""
