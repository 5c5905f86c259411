"""GSPO, group sequence policy optimization: arXiv 2507.18071, section 4.1. One ratio for a whole response:

    s_i = (pi(o_i) / pi_old(o_i))^(1 / |o_i|) = exp(mean over t of log r_it)
    J = 1/R sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)          low = 3e-4, high = 4e-4 (section 5.1)

The mean over responses is `algorithm.aggregation: sequence_mean`. The bounds are small because s_i is a geometric mean.

Example, A = +1, two tokens with r = 2 and r = 0.5: s = 1, free; each token's log-prob has half the gradient of s.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from megatron_dapo.algorithm.kl import EXPONENT_BOUND
from megatron_dapo.algorithm.losses.clipped import clipped_surrogate
from megatron_dapo.algorithm.token_loss import LossColumns, TokenLoss, clip_stats, response_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPO:
    """`algorithm.policy_loss: gspo`."""

    low: float
    high: float

    stat_names: ClassVar[tuple[str, ...]] = ("clipped_low", "clipped_high")
    """1 on the tokens of a response whose gradient that clip cuts."""

    def __call__(self, log_probs: Float[Tensor, " T"], columns: LossColumns) -> TokenLoss:
        mean = response_mean(log_probs - columns.old_log_probs, columns)
        ratio, advantages = mean.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp(), columns.advantages
        loss = clipped_surrogate(ratio, advantages, low=self.low, high=self.high)
        return TokenLoss(loss=loss, stats=clip_stats(ratio.detach(), advantages, 1 - self.low, 1 + self.high))
