"""Where the thinking of a response is interrupted: the config's keys as token ids."""

import numpy as np

from megatron_dapo.config import ConfigError
from megatron_dapo.data.tokenizer import TextTools
from rollout.config import RolloutConfig
from rollout.generation import ThinkingLimit


def thinking_limit(rollout: RolloutConfig, text: TextTools) -> ThinkingLimit | None:
    """Of `rollout.thinking_budget`; None: no thinking is interrupted.

    Raises:
        ConfigError: `thinking_end` has no tokens, or one that ends a response.
    """
    budget, phrase = rollout.thinking_budget, rollout.thinking_end
    if budget is None or phrase is None:
        return None
    mark = rollout.thinking_mark or phrase.strip()
    ids = tuple(text.tokenizer.encode(phrase, add_special_tokens=False))
    if not ids:
        raise ConfigError(f"rollout.thinking_end = {phrase!r}: the model's tokenizer makes no token of it")
    if ending := set(ids).intersection(text.stop_token_ids):
        raise ConfigError(f"rollout.thinking_end = {phrase!r}: its token {min(ending)} ends a response")

    def ended(drawn: np.ndarray) -> bool:
        return mark in text.decoder.decode(drawn, skip_special_tokens=False)

    return ThinkingLimit(budget=budget, end_ids=ids, ended=ended)
