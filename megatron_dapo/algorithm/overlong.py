"""Rewards: the rule-based reward of eq. 7, and two penalties on responses that are too long (section 3.4).

The third way, overlong filtering, is a mask of `aggregation.token_weights`: a truncated response weighs 0, leaves the
denominators and stays in the statistics of its group (see `advantage`).

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


def raw_reward(accuracy: Bool[Tensor, "*R"]) -> Float[Tensor, "*R"]:
    """Eq. 7: +1 where the answer is right, -1 where it is not; float64."""
    return accuracy.to(torch.float64) * 2 - 1


def soft_overlong_penalty(
    lengths: Int[Tensor, "*R"], *, max_length: int, buffer: int, factor: float = 1.0
) -> Float[Tensor, "*R"]:
    """Eq. 13 times `factor`, in [-factor, 0]. A response cut off at `max_length` gets -factor.

    Args:
        lengths: response tokens, |y|.
        max_length: L_max, the longest response that can be generated.
        buffer: L_cache, the last tokens before `max_length`, over which the penalty grows; 0 < buffer <= max_length.
    """
    return ((max_length - buffer - lengths.to(torch.float64)) / buffer).clamp(-1.0, 0.0) * factor


def linear_penalty(lengths: Int[Tensor, "*R"], *, start: int, factor: float = 1.0) -> Float[Tensor, "*R"]:
    """-factor * max(0, |y| - start) / start: no upper end, so that ever longer responses cost ever more.

    Example: start = 1000, factor = 0.5: 1000 tokens cost 0, 1500 cost 0.25, 3000 cost 1.
    """
    return (lengths.to(torch.float64) - start).clamp(min=0.0) * (-factor / start)


def shaped_rewards(
    reward: Float[Tensor, "*R"],
    lengths: Int[Tensor, "*R"],
    *,
    shape: Literal["none", "soft", "linear"],
    max_length: int,
    buffer: int,
    factor: float = 1.0,
) -> Float[Tensor, "*R"]:
    """`reward` (eq. 7, or a weighted sum) plus the penalty: what eq. 9 reads. `linear` starts at max_length - buffer,
    as `soft` does."""
    if shape == "soft":
        return reward + soft_overlong_penalty(lengths, max_length=max_length, buffer=buffer, factor=factor)
    return reward + linear_penalty(lengths, start=max_length - buffer, factor=factor) if shape == "linear" else reward
