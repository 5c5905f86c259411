"""GMPO, geometric-mean policy optimization: arXiv 2507.20673. Tokens are clipped, then their geometric mean is taken:

    J = 1/R sum_i A_i (prod_t c_it)^(1 / |o_i|)      c = min(r, 1 + high) where A > 0, max(r, 1 - low) where A < 0

The paper clips to (e^-0.4, e^0.4): low = 0.330, high = 0.492. The mean over responses is `algorithm.aggregation:
sequence_mean`. One token with a large ratio moves the product's root little, where it rules an arithmetic mean.

Example, A = +1, high = 0.5, two tokens with r = 1 and r = 6: c = 1 and 1.5, the loss is -sqrt(1.5) = -1.22.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_dapo.algorithm.kl import EXPONENT_BOUND
from megatron_dapo.algorithm.token_loss import LossColumns, TokenLoss, clip_stats, response_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class GMPO:
    """`algorithm.policy_loss: gmpo`."""

    low: float
    high: float

    stat_names: ClassVar[tuple[str, ...]] = ("clipped_low", "clipped_high")
    """1 where that clip cuts the token's gradient."""

    def __call__(self, log_probs: Float[Tensor, " T"], columns: LossColumns) -> TokenLoss:
        difference, advantages = log_probs - columns.old_log_probs, columns.advantages
        above, below = math.log1p(self.high), math.log1p(-self.low) if self.low < 1 else -math.inf
        clipped = torch.where(advantages > 0, difference.clamp(max=above), difference.clamp(min=below))
        mean = response_mean(clipped, columns).clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()
        return TokenLoss(loss=-mean * advantages, stats=clip_stats(difference.detach(), advantages, below, above))
