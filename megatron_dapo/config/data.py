"""Section `data`: the prompts and the text that carries them."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import STRICT, PositiveInt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    path: str
    """Prompt file: JSON lines (.jsonl) or parquet (.parquet)."""

    prompt_key: str = "prompt"
    """Column of the prompt: a text, or a chat list of {role, content}. Dots reach into objects."""

    answer_key: str = "answer"
    """Column of the ground truth; `reward_model.ground_truth` in the DAPO-Math-17k schema."""

    template: Annotated[str, Field(pattern=r"\{prompt\}")] | Literal["chat", "plain"] = "chat"
    """`chat`: the tokenizer's chat template. `plain`: the prompt as it is. Else a text that holds `{prompt}`."""

    max_prompt_tokens: PositiveInt = 2048
    """Longer prompts are handled by `too_long`. Counted after the template."""

    too_long: Literal["stop", "drop"] = "stop"
    """A prompt over `max_prompt_tokens`: `stop` names it and ends; `drop` leaves it out and counts it."""

    broken_rows: Literal["stop", "skip"] = "stop"
    """A row that is no JSON, lacks a key or has an empty answer: `stop` names file and line and ends; `skip` counts
    it."""

    deduplicate: bool = True
    """Keep one row a prompt text (AIME 2024 ships each of its 30 problems 32 times)."""
