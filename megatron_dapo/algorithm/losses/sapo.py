"""SAPO, soft adaptive policy optimization: arXiv 2511.20347. A smooth gate stands in for the clip:

    J_t = f(r) A        f(r) = 4/tau sigmoid(tau (r - 1))        tau = positive where A > 0, else negative

The slope of f is 1 at r = 1 and falls to both sides, the faster the larger tau is. The paper's tau is 1.0 for positive
and 1.05 for negative advantages, and its mean is over tokens, then responses (`algorithm.aggregation: sequence_mean`).

Example, A = +1, tau = 1: at r = 1 the loss is -2 with gradient -1 in log pi; at r = 3, -3.52 with -1.26 (eq. 8: 0).
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_dapo.algorithm.token_loss import LossColumns, TokenLoss, importance_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class SAPO:
    """`algorithm.policy_loss: sapo`; the two tau are `algorithm.loss_options`."""

    positive: float = 1.0
    negative: float = 1.05

    stat_names: ClassVar[tuple[str, ...]] = ("gate",)
    """The slope of f, in (0, 1]: what is left of the unclipped gradient."""

    def __call__(self, log_probs: Float[Tensor, " T"], columns: LossColumns) -> TokenLoss:
        ratio = importance_ratio(log_probs, columns.old_log_probs)
        tau = torch.where(columns.advantages > 0, torch.full_like(ratio, self.positive), self.negative).detach()
        gate = torch.sigmoid(tau * (ratio - 1))
        slope = (4 * gate * (1 - gate)).detach()
        return TokenLoss(loss=-4 / tau * gate * columns.advantages, stats={"gate": slope})
