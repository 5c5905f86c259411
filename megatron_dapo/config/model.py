"""Section `model`: which weights are trained."""

from typing import Literal

from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import STRICT, PositiveInt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    path: str
    """Folder in Hugging Face format: config.json, safetensors, tokenizer."""

    context_length: PositiveInt
    """Longest prompt plus response in tokens; also the server's context length."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in forward and backward and on the servers. Optimizer and master weights are float32
    always."""
