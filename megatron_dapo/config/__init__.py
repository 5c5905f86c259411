"""Typed, frozen config: one file a section. Imports neither torch nor ray, megatron or sglang."""

from megatron_dapo.config.base import ConfigError
from megatron_dapo.config.load import dump_config, load_config
from megatron_dapo.config.root import Config

__all__ = ["Config", "ConfigError", "dump_config", "load_config"]
