"""What teaches a base model before reinforcement learning: the actor minimises it in place of a policy loss."""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from megatron_dapo.algorithm.token_loss import LossColumns, TokenLoss


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
