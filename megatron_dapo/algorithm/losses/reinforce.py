"""REINFORCE with truncated importance weights, as in LlamaRL's AIPO (arXiv 2505.24034) and ScaleRL (arXiv
2510.13786, with upper = 5); the truncation is V-trace's (arXiv 1802.01561).

    J_t = sg(min(pi(y_t) / mu(y_t), upper)) A log pi(y_t)         sg: no gradient

mu is the engine that sampled the token: its kernels, its weights. One ratio corrects for mismatch, for staleness and
for the updates inside the rollout step, so there is no pi_old and no further correction.

Example, A = +1, upper = 2: pi / mu = 0.5 has the gradient -0.5 in log pi, 1.5 has -1.5, 9 has -2.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from megatron_dapo.algorithm.token_loss import LossColumns, TokenLoss, importance_ratio, indicator


@dataclass(frozen=True, kw_only=True, slots=True)
class Reinforce:
    """`algorithm.policy_loss: reinforce`."""

    upper: float

    stat_names: ClassVar[tuple[str, ...]] = ("truncated",)
    """1 where the weight was lowered to `upper`."""

    def __call__(self, log_probs: Float[Tensor, " T"], columns: LossColumns) -> TokenLoss:
        assert columns.rollout_log_probs is not None
        ratio = importance_ratio(log_probs.detach(), columns.rollout_log_probs)
        loss = -ratio.clamp(max=self.upper) * columns.advantages * log_probs
        return TokenLoss(loss=loss, stats={"truncated": indicator(ratio > self.upper, ratio)})
