"""DAPO's clipped surrogate with clip-higher, arXiv 2503.14476 eq. 8 and section 3.1. With r = pi(y_t) / pi_old(y_t):

    J_t = min(r A, clip(r, 1 - low, 1 + high) A)              low = 0.2, high = 0.28

Example, A = +1: r = 1.2 gives the loss -1.2 (free), r = 1.5 gives -1.28 (clipped: no gradient), r = 0.5 gives -0.5.
A = -1: r = 0.9 gives 0.9 (free), r = 0.5 gives 0.8 (clipped), r = 30 gives 30 (free; with dual = 10: 10, clipped).
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_dapo.algorithm.token_loss import LossColumns, TokenLoss, clip_stats, importance_ratio, indicator


def clipped_surrogate(
    ratio: Float[Tensor, " N"], advantages: Float[Tensor, " N"], *, low: float, high: float, dual: float | None = None
) -> Float[Tensor, " N"]:
    """The negated summand of eq. 8 at each ratio.

    Args:
        low: the ratio is clipped at 1 - low.
        high: the ratio is clipped at 1 + high; the paper raises it above `low` to leave rare tokens room to grow.
        dual: with A < 0 the loss is at most dual * |A|, as in dual-clip PPO (arXiv 1912.09729); exceeds 1 + high.
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Clipped:
    """`algorithm.policy_loss: clipped`, the paper's."""

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None

    @property
    def stat_names(self) -> tuple[str, ...]:
        """clipped_low, clipped_high, clipped_dual: 1 where that clip cuts the gradient, else 0. clipped_high_prob: pi
        where clipped_high is 1, else 0: the two sums give figure 3a's mean probability of up-clipped tokens."""
        return ("clipped_low", "clipped_high", "clipped_high_prob") + ("clipped_dual",) * (self.dual is not None)

    def __call__(self, log_probs: Float[Tensor, " T"], columns: LossColumns) -> TokenLoss:
        ratio, advantages = importance_ratio(log_probs, columns.old_log_probs), columns.advantages
        loss = clipped_surrogate(ratio, advantages, low=self.low, high=self.high, dual=self.dual)
        ratio = ratio.detach()
        stats = clip_stats(ratio, advantages, 1 - self.low, 1 + self.high)
        stats["clipped_high_prob"] = stats["clipped_high"] * log_probs.detach().clamp(max=0.0).exp()
        if self.dual is not None:
            stats["clipped_dual"] = indicator((ratio > self.dual) & (advantages < 0), ratio)
        return TokenLoss(loss=loss, stats=stats)
