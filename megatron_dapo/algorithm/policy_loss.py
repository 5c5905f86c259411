"""What the actor minimises: a policy loss (eq. 8 or one of its relatives in `losses`), and what may be added to it.

    token loss = correction * policy loss + kl_coefficient * KL - entropy_coefficient * H

`token_loss` says what a token loss is and why it needs to know nothing of ranks, packing and denominators.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from dataclasses import dataclass, field
from typing import Literal, Protocol

from jaxtyping import Float
from torch import Tensor

from megatron_dapo.algorithm.kl import Estimator, kl_estimate, sequence_kl_estimate
from megatron_dapo.algorithm.losses.clipped import Clipped
from megatron_dapo.algorithm.token_loss import LossColumns, PolicyLoss, TokenLoss


class Objective(Protocol):
    """What the actor minimises: a token loss from log-probs, entropy and columns."""

    @property
    def stat_names(self) -> tuple[str, ...]: ...

    @property
    def uses_entropy_gradient(self) -> bool: ...

    def __call__(self, log_probs: Tensor, entropy: Tensor, columns: LossColumns | None) -> TokenLoss: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyObjective:
    """A policy loss with its optional companions; the default is eq. 8 alone."""

    loss: PolicyLoss = field(default_factory=Clipped)
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_aggregation: Literal["token", "sequence", "response_mean", "response_sum"] = "token"
    entropy_coefficient: float = 0.0

    @property
    def stat_names(self) -> tuple[str, ...]:
        """Keys of `TokenLoss.stats`, a number a token; their means weigh every loss-carrying token alike.

        approx_kl_old: k3 of pi_old against pi. Then the policy loss's own. kl: to the reference.
        """
        return ("approx_kl_old", *self.loss.stat_names) + ("kl",) * (self.kl_coefficient > 0)

    @property
    def uses_entropy_gradient(self) -> bool:
        """Whether `entropy` must carry a gradient."""
        return self.entropy_coefficient > 0

    def __call__(
        self, log_probs: Float[Tensor, " T"], entropy: Float[Tensor, " T"], columns: LossColumns | None
    ) -> TokenLoss:
        """Loss and statistics of T tokens."""
        assert columns is not None
        try:
            policy = self.loss(log_probs, columns)
        except Exception as error:  # it may be a user's own, and this is read far from its traceback
            raise RuntimeError(f"algorithm.policy_loss ({type(self.loss).__name__}): {error!r}") from error
        loss = policy.loss if columns.correction is None else columns.correction * policy.loss
        stats = {"approx_kl_old": kl_estimate(columns.old_log_probs, log_probs.detach(), "k3"), **policy.stats}
        if self.kl_coefficient > 0:
            kl = self._kl(log_probs, columns)
            loss = loss + self.kl_coefficient * (kl if columns.kl_scale is None else columns.kl_scale * kl)
            stats["kl"] = kl.detach()
        if self.entropy_coefficient > 0:
            loss = loss - self.entropy_coefficient * entropy
        return TokenLoss(loss=loss, stats=stats)

    def _kl(self, log_probs: Tensor, columns: LossColumns) -> Tensor:
        assert columns.reference_log_probs is not None
        if self.kl_aggregation != "sequence":  # what else differs between the others is `columns.kl_scale`
            return kl_estimate(log_probs, columns.reference_log_probs, self.kl_estimator)
        responses = {"sequence_index": columns.sequence_index, "sequence_lengths": columns.sequence_lengths}
        return sequence_kl_estimate(log_probs, columns.reference_log_probs, self.kl_estimator, **responses)
