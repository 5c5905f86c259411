"""CISPO, clipped importance-sampling weights: arXiv 2506.13585, section 3.1.

    J_t = sg(clip(r, 1 - low, 1 + high)) A log pi(y_t)         r = pi / pi_old, sg: no gradient

The clip bounds how much a token weighs, not whether it teaches: a rare token that becomes much likelier keeps its
gradient, which eq. 8 of DAPO drops. The paper sets no lower bound in practice: low = 1.

Example, A = +1, high = 3: r = 2 has the gradient -2 in log pi, r = 50 has -4.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from megatron_dapo.algorithm.token_loss import LossColumns, TokenLoss, importance_ratio, indicator


@dataclass(frozen=True, kw_only=True, slots=True)
class CISPO:
    """`algorithm.policy_loss: cispo`."""

    low: float
    high: float

    stat_names: ClassVar[tuple[str, ...]] = ("capped_low", "capped_high")
    """1 where that bound holds the weight, whatever the advantage's sign."""

    def __call__(self, log_probs: Float[Tensor, " T"], columns: LossColumns) -> TokenLoss:
        ratio = importance_ratio(log_probs.detach(), columns.old_log_probs)
        weight = ratio.clamp(1 - self.low, 1 + self.high)
        low, high = indicator(ratio < 1 - self.low, ratio), indicator(ratio > 1 + self.high, ratio)
        stats = {"capped_low": low, "capped_high": high}
        return TokenLoss(loss=-weight * columns.advantages * log_probs, stats=stats)
