"""Rewards: the rule-based reward of eq. 7, and three ways to deal with responses that are too long (section 3.4).

    eq. 7    R = 1 if the answer is equivalent to the ground truth, else -1

    eq. 13   R_length(y) = 0                                      |y| <= L_max - L_cache
                           ((L_max - L_cache) - |y|) / L_cache    in between
                           -1                                     L_max < |y|

R_length is added to R, so the shaped reward is in [-2, 1]. Dynamic sampling never reads it: it asks for accuracy.

Example, L_max = 20480, L_cache = 4096: 16384 tokens cost 0, 18432 cost 0.5 (a wrong answer: -1.5), 20480 cost 1.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PenaltyShape = Literal["none", "soft", "linear"]


def raw_reward(accuracy: Bool[Tensor, "*R"], *, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*R"]:
    """Eq. 7: +1 where the answer is right, -1 where it is not."""
    return accuracy.to(dtype) * 2 - 1


def soft_overlong_penalty(
    lengths: Int[Tensor, "*R"], *, max_length: int, buffer: int, factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*R"]:
    """Eq. 13 times `factor`, in [-factor, 0]. A response cut off at `max_length` gets -factor.

    Args:
        lengths: response tokens, |y|.
        max_length: L_max, the longest response that can be generated.
        buffer: L_cache, the last tokens before `max_length`, over which the penalty grows; 0 < buffer <= max_length.
    """
    _require(0 < buffer <= max_length, f"overlong buffer {buffer}: must be in 1..max_length = {max_length}")
    start = max_length - buffer
    return ((start - lengths.to(dtype)) / buffer).clamp(-1.0, 0.0) * factor


def linear_penalty(
    lengths: Int[Tensor, "*R"], *, start: int, factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*R"]:
    """-factor * max(0, |y| - start) / start: no upper end, so that ever longer responses cost ever more.

    Example: start = 1000, factor = 0.5: 1000 tokens cost 0, 1500 cost 0.25, 3000 cost 1.
    """
    _require(start > 0, f"linear penalty from {start} tokens: it must start at 1 or later")
    return (lengths.to(dtype) - start).clamp(min=0.0) * (-factor / start)


def shaped_rewards(
    accuracy: Bool[Tensor, "*R"],
    lengths: Int[Tensor, "*R"],
    *,
    shape: PenaltyShape,
    max_length: int,
    buffer: int,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*R"]:
    """Eq. 7 plus the penalty: what eq. 9 reads. `linear` starts at max_length - buffer, as `soft` does."""
    reward = raw_reward(accuracy, dtype=dtype)
    if shape == "soft":
        reward = reward + soft_overlong_penalty(
            lengths, max_length=max_length, buffer=buffer, factor=factor, dtype=dtype
        )
    elif shape == "linear":
        reward = reward + linear_penalty(lengths, start=max_length - buffer, factor=factor, dtype=dtype)
    return reward


def overlong_filter_mask(truncated: Bool[Tensor, " R"]) -> Bool[Tensor, " R"]:
    """Overlong filtering: True where a response carries loss, i.e. was not cut off at the length limit.

    It is the `mask` of `aggregation.token_weights`: filtered responses weigh 0 and leave the denominators. They stay in
    the statistics of their group (see `advantage`).
    """
    return ~truncated


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
