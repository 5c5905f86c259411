"""The learning rate over optimizer steps. Plain numbers: it is chosen before Megatron is there."""

from dataclasses import dataclass

from megatron_dapo.config.actor_config import OptimizerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Linear warm-up, then constant, or a cosine down to `final_fraction` of the peak.

    Optimizer step k = 1, 2, ... of a warm-up of W steps has the rate peak * k / W: no step is spent at rate 0.
    """

    peak: float
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Optimizer step, warm-up included, at which the cosine reaches its end; None: constant after the warm-up."""

    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"learning rate: decay_steps = {self.decay_steps} must exceed warmup_steps = {self.warmup_steps}"
            )

    @classmethod
    def of(cls, config: OptimizerConfig, *, steps_per_rollout: int) -> "LearningRate":
        """The paper's: warm-up over rollout steps, each of `steps_per_rollout` optimizer steps, then constant."""
        return cls(peak=config.lr, warmup_steps=round(config.warmup_rollout_steps * steps_per_rollout))

    @property
    def final(self) -> float:
        """Rate after the decay; the peak without one."""
        return self.peak if self.decay_steps is None else self.peak * self.final_fraction
