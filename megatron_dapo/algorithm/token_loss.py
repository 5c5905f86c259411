"""What the losses of the family share: what they read, what they give, the ratio, and means over whole responses.

A *policy loss* is the summand of one paper's objective, negated, for each of T tokens. It is *unreduced*: its
denominator is a weight of each token (`aggregation.token_weights`), computed once for the whole mini-batch, and the
loss of the mini-batch is sum(weight * token loss), however the tokens lie in micro-batches and on ranks.

A loss of a whole response (GSPO, GMPO) lays the response's value on each of its tokens: every aggregation weighs the
tokens of a response alike, so their weighted sum is that value times the response's weight, with its gradient. Nothing
else is needed to be exact over ranks: a response is never split over micro-batches, and under context parallelism every
rank has the log-probs of whole responses and hands back the gradient of its own tokens.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from megatron_dapo.algorithm.kl import EXPONENT_BOUND


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

    rollout_log_probs: Float[Tensor, " T"] | None = None
    """log mu by the engine that sampled the token; for losses that take their ratio to it."""

    reference_log_probs: Float[Tensor, " T"] | None = None
    """log ref by the starting weights; needed only with a KL term."""

    kl_scale: Float[Tensor, " T"] | None = None
    """The KL term's token weight over the loss's (`aggregation.kl_scale`); None: 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """Loss and statistics of T tokens, unreduced."""

    loss: Float[Tensor, " T"]
    """To be multiplied with the token weights and summed; carries the gradient."""

    stats: Mapping[str, Float[Tensor, " T"]]
    """Detached; the keys are the loss's `stat_names`."""


@runtime_checkable
class PolicyLoss(Protocol):
    """A file of `losses`, or a user's own: a frozen dataclass of its bounds."""

    @property
    def stat_names(self) -> tuple[str, ...]: ...

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss: ...


def importance_ratio(log_probs: Float[Tensor, " N"], old_log_probs: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """r = pi / pi_old. Beyond e^+-20 it is held there, without gradient, so that float32 stays finite."""
    return (log_probs - old_log_probs).clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def response_mean(values: Float[Tensor, " T"], columns: LossColumns) -> Float[Tensor, " T"]:
    """The mean of `values` over each response's tokens, on each of them; added up in float64, so that 20 000 tokens in
    another order give the same. A token's own value has the gradient 1 / |o_i|.

    Example: values 1, 2, 6 of responses 0, 1, 1: 1, 4, 4.
    """
    totals = values.double().new_zeros(columns.sequence_lengths.shape[0])
    totals = totals.index_add(0, columns.sequence_index, values.double())
    return (totals / columns.sequence_lengths.clamp(min=1))[columns.sequence_index].to(values.dtype)


def clip_stats(value: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """1 where a clip of `value` to [low, high] cuts the gradient of a loss that `advantages` multiply, else 0."""
    below, above = (value < low) & (advantages < 0), (value > high) & (advantages > 0)
    return {"clipped_low": indicator(below, value), "clipped_high": indicator(above, value)}


def indicator(condition: Tensor, like: Tensor) -> Tensor:
    """1 where `condition` holds, else 0: a statistic."""
    return condition.to(like.dtype)
