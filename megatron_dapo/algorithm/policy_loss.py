"""The loss of a token: the summand of eq. 8, and what may be added to it.

Eq. 8 with clip-higher (section 3.1), r = pi(y_t) / pi_old(y_t):

    J_t = min(r A, clip(r, 1 - low, 1 + high) A)              low = 0.2, high = 0.28

Losses are minimised, so a token's loss is -J_t. It is *unreduced*: the denominator of eq. 8 is a weight of each token
(`aggregation.token_weights`), computed once for the whole mini-batch, and the loss of the mini-batch is
sum(weight * token loss), however the tokens lie in micro-batches and on ranks.

Example, A = +1: r = 1.2 gives -1.2 (free), r = 1.5 gives -1.28 (clipped: no gradient), r = 0.5 gives -0.5 (free).
A = -1: r = 0.9 gives 0.9 (free), r = 0.5 gives 0.8 (clipped), r = 30 gives 30 (free; with dual = 10: 10, clipped).
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_dapo.algorithm.kl import EXPONENT_BOUND, Estimator, kl_estimate, sequence_kl_estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class LossColumns:
    """What the loss of T response tokens reads beside the model's output, one entry a token."""

    advantages: Float[Tensor, " T"]
    """Eq. 9, the response's advantage on each of its tokens."""

    old_log_probs: Float[Tensor, " T"]
    """log pi_old by the trainer, before the first update of the rollout step."""

    sequence_index: Int[Tensor, " T"]
    """Which of the S responses of the micro-batch the token belongs to."""

    sequence_lengths: Int[Tensor, " S"]
    """Response tokens of each of the S responses; all of them are here, a response is never split."""

    correction: Float[Tensor, " T"] | None = None
    """Weight against the engine's mismatch (`importance.correction_weights`); None: 1."""

    reference_log_probs: Float[Tensor, " T"] | None = None
    """log ref by the starting weights; needed only with a KL term."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """Loss and statistics of T tokens, unreduced."""

    loss: Float[Tensor, " T"]
    """To be multiplied with the token weights and summed; carries the gradient."""

    stats: Mapping[str, Float[Tensor, " T"]]
    """Detached; the keys are the objective's `stat_names`."""


class Objective(Protocol):
    """What the actor minimises: a token loss from log-probs, entropy and columns."""

    @property
    def stat_names(self) -> tuple[str, ...]: ...

    @property
    def uses_entropy_gradient(self) -> bool: ...

    def __call__(self, log_probs: Tensor, entropy: Tensor, columns: LossColumns | None) -> TokenLoss: ...


def importance_ratio(log_probs: Float[Tensor, " N"], old_log_probs: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """r = pi / pi_old. Beyond e^+-20 it is held there, without gradient, so that float32 stays finite."""
    return (log_probs - old_log_probs).clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def clipped_surrogate(
    log_probs: Float[Tensor, " N"],
    old_log_probs: Float[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> Float[Tensor, " N"]:
    """The negated summand of eq. 8 for each token, unreduced; differentiable in `log_probs`.

    Args:
        low: the ratio is clipped at 1 - low.
        high: the ratio is clipped at 1 + high; the paper raises it above `low` to leave rare tokens room to grow.
        dual: with A < 0 the loss is at most dual * |A|, as in dual-clip PPO (arXiv 1912.09729); exceeds 1 + high.
    """
    ratio = importance_ratio(log_probs, old_log_probs)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyObjective:
    """Eq. 8 and its optional companions: correction * surrogate + kl_coefficient * KL - entropy_coefficient * H."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_aggregation: Literal["token", "sequence"] = "token"
    entropy_coefficient: float = 0.0

    @property
    def stat_names(self) -> tuple[str, ...]:
        """Keys of `TokenLoss.stats`. Each is 0 or a number a token; their means weigh every loss-carrying token alike.

        approx_kl_old: k3 of pi_old against pi. clipped_low, clipped_high, clipped_dual: 1 where that clip
        cuts the gradient. clipped_high_prob: pi_old where clipped_high is 1, else 0: the two sums give figure 3's mean.
        kl: to the reference.
        """
        names = ("approx_kl_old", "clipped_low", "clipped_high", "clipped_high_prob")
        return names + ("clipped_dual",) * (self.clip_dual is not None) + ("kl",) * (self.kl_coefficient > 0)

    @property
    def uses_entropy_gradient(self) -> bool:
        """Whether `entropy` must carry a gradient."""
        return self.entropy_coefficient > 0

    def __call__(
        self, log_probs: Float[Tensor, " T"], entropy: Float[Tensor, " T"], columns: LossColumns | None
    ) -> TokenLoss:
        """Loss and statistics of T tokens.

        Raises:
            ValueError: a column is missing that this objective reads.
        """
        if columns is None:
            raise ValueError("the policy objective reads advantages and old log-probs: give it LossColumns")
        loss = clipped_surrogate(
            log_probs,
            columns.old_log_probs,
            columns.advantages,
            low=self.clip_low,
            high=self.clip_high,
            dual=self.clip_dual,
        )
        if columns.correction is not None:
            loss = columns.correction * loss
        stats = self._clip_stats(log_probs.detach(), columns)
        if self.kl_coefficient > 0:
            kl = self._kl(log_probs, columns)
            loss = loss + self.kl_coefficient * kl
            stats["kl"] = kl.detach()
        if self.entropy_coefficient > 0:
            loss = loss - self.entropy_coefficient * entropy
        return TokenLoss(loss=loss, stats=stats)

    def _kl(self, log_probs: Tensor, columns: LossColumns) -> Tensor:
        if columns.reference_log_probs is None:
            raise ValueError("the KL term reads reference_log_probs, but there are none; set kl_coefficient to 0")
        if self.kl_aggregation == "token":
            return kl_estimate(log_probs, columns.reference_log_probs, self.kl_estimator)
        return sequence_kl_estimate(
            log_probs,
            columns.reference_log_probs,
            self.kl_estimator,
            sequence_index=columns.sequence_index,
            sequence_lengths=columns.sequence_lengths,
        )

    def _clip_stats(self, log_probs: Tensor, columns: LossColumns) -> dict[str, Tensor]:
        ratio = importance_ratio(log_probs, columns.old_log_probs)
        clipped_low = ((ratio < 1 - self.clip_low) & (columns.advantages < 0)).to(ratio.dtype)
        clipped_high = ((ratio > 1 + self.clip_high) & (columns.advantages > 0)).to(ratio.dtype)
        stats = {
            "approx_kl_old": kl_estimate(columns.old_log_probs, log_probs, "k3"),
            "clipped_low": clipped_low,
            "clipped_high": clipped_high,
            "clipped_high_prob": clipped_high * columns.old_log_probs.exp(),
        }
        if self.clip_dual is not None:
            stats["clipped_dual"] = ((ratio > self.clip_dual) & (columns.advantages < 0)).to(ratio.dtype)
        return stats


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedObjective:
    """Cross-entropy on given responses, -log pi(y_t): used to teach a base model before reinforcement learning."""

    stat_names: ClassVar[tuple[str, ...]] = ()
    uses_entropy_gradient: ClassVar[bool] = False

    def __call__(
        self, log_probs: Float[Tensor, " T"], entropy: Float[Tensor, " T"], columns: LossColumns | None = None
    ) -> TokenLoss:
        """-log pi(y_t) of each token, in nats."""
        return TokenLoss(loss=-log_probs, stats={})
