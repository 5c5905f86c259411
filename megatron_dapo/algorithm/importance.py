"""Correction for the mismatch between the engine that sampled a token and the trainer that learns from it.

Both hold the same weights, but other kernels and number formats give other probabilities, and a carried group was
sampled by older weights. With w = pi_old(y) / pi_rollout(y), of a token or of a whole response (product over tokens):

    truncated    w -> min(w, upper)
    masked       w -> w inside [lower, upper], else 0 (the token's loss is dropped; denominators stay as they are)

Not in the paper. The weight multiplies the token's loss and carries no gradient.

Example: token log-probs old -1.0, rollout -2.0: w = 2.718. truncated at 2: 2.0; masked to [0.5, 2]: 0.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_dapo.algorithm.kl import EXPONENT_BOUND, kl_estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Weights of N tokens and how often a bound was met."""

    weights: Float[Tensor, " N"]
    """To be multiplied with the token losses."""

    truncated_share: float
    """Share of tokens whose w was lowered to `upper`, in [0, 1]."""

    masked_share: float
    """Share of tokens that were dropped, in [0, 1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """How far the trainer's log-probs are from the engine's, over N tokens; d = old - rollout, in nats."""

    kl: float
    """KL(rollout || old), k3: mean of exp(d) - 1 - d."""

    max_abs: float
    """max |d|."""

    mean_abs: float
    """mean |d|."""


def correction_weights(
    old_log_probs: Float[Tensor, " N"],
    rollout_log_probs: Float[Tensor, " N"],
    *,
    mode: Literal["truncated", "masked"],
    level: Literal["token", "sequence"],
    upper: float,
    lower: float,
    response_lengths: Int[Tensor, " R"],
) -> Correction:
    """Weights of the N tokens of R responses, response after response.

    Args:
        old_log_probs: log pi_old by the trainer, in nats.
        rollout_log_probs: log-probs of the same tokens by the engine that sampled them.
        level: `sequence` gives every token of a response the response's w.
        upper: upper bound of w.
        lower: lower bound of w, read by `masked` only.
        response_lengths: tokens of each response; their sum is N.
    """
    log_weight = (old_log_probs - rollout_log_probs).detach()
    if level == "sequence":
        index = torch.arange(response_lengths.shape[0], device=log_weight.device).repeat_interleave(response_lengths)
        log_weight = log_weight.new_zeros(response_lengths.shape[0]).index_add(0, index, log_weight)[index]
    # Bounded before exp: a response's sum may reach hundreds, and an infinite w must not meet a loss of 0.
    weight = log_weight.clamp(max=EXPONENT_BOUND).exp()
    if mode == "truncated":
        return Correction(weights=weight.clamp(max=upper), truncated_share=_share(weight > upper), masked_share=0.0)
    outside = (weight > upper) | (weight < lower)
    return Correction(weights=torch.where(outside, 0.0, weight), truncated_share=0.0, masked_share=_share(outside))


def mismatch(old_log_probs: Float[Tensor, " N"], rollout_log_probs: Float[Tensor, " N"]) -> Mismatch:
    """The gap between trainer and engine; all zero without tokens."""
    difference = old_log_probs - rollout_log_probs
    if difference.numel() == 0:
        return Mismatch(kl=0.0, max_abs=0.0, mean_abs=0.0)
    kl, gap = kl_estimate(rollout_log_probs, old_log_probs, "k3").mean().item(), difference.abs()
    return Mismatch(kl=kl, max_abs=gap.max().item(), mean_abs=gap.mean().item())


def _share(flags: Tensor) -> float:
    return flags.double().mean().item() if flags.numel() else 0.0
