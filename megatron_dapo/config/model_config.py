"""Section `model`: which weights are trained."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import STRICT, PositiveInt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    path: str
    """Folder in Hugging Face format: config.json, safetensors, tokenizer."""

    context_length: PositiveInt
    """Longest prompt plus response in tokens; also the server's context length."""

    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    """Tokens that end a response. Empty: those of tokenizer, generation_config.json and config.json, which must agree.
    SGLang always ends at the last two's, so these must be included."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in forward and backward and on the servers. Optimizer and master weights are float32
    always."""
