"""What goes to the servers and what comes back."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class FinishReason(StrEnum):
    """Why a response ended, as the server says; truncation is `LENGTH`, never guessed from padding."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Greedy is temperature 0.

    Example: SamplingParams(max_new_tokens=64, temperature=1.0, stop_token_ids=(2,)).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One response to write.

    Example: GenerationRequest(request_id="p7-v3-s0.", group_id="p7", prompt_ids=np.array([12, 9], np.int32),
    sampling=SamplingParams(max_new_tokens=64), seed=17).
    """

    request_id: str
    """Unique among the requests in flight."""
    group_id: str
    """Requests of one group stay on one server, for its prefix cache."""
    prompt_ids: np.ndarray
    """int32 [P], P >= 1."""
    sampling: SamplingParams
    seed: int
    """Seed of this response alone; counts with `rollout.deterministic`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One response. Three tokens, the last one the end token:

    Generation(request_id="p7-v3-s0.", token_ids=array([5, 9, 2]), log_probs=array([-0.1, -1.2, 0.0]),
    weight_versions=array([3, 3, 3]), finish_reason=FinishReason.STOP).
    """

    request_id: str
    token_ids: np.ndarray
    """int32 [T], a matched stop token included."""
    log_probs: np.ndarray
    """float32 [T], of the distribution that the token was drawn from (before top-p), in nats."""
    weight_versions: np.ndarray
    """int32 [T]: which weights wrote the token."""
    finish_reason: FinishReason
