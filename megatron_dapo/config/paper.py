"""The settings that the paper states (arXiv 2503.14476), key by key: what a config is compared with.

They stand here a second time on purpose: a default that is changed by mistake shows as a difference from the paper.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """One setting of the paper."""

    key: str
    value: Any
    where: str
    """Equation or section of the paper, or what else states it."""


def _stated(key: str, value: Any, where: str) -> Stated:
    return Stated(key=key, value=value, where=where)


_RECIPE = "published recipe; the paper names none"

PAPER: tuple[Stated, ...] = (
    _stated("algorithm.prompts_per_step", 512, "section 4.1"),
    _stated("algorithm.group_size", 16, "section 4.1"),
    _stated("algorithm.mini_batch_responses", 512, "section 4.1: 16 updates a rollout step"),
    _stated("algorithm.aggregation", "token_mean", "eq. 8, section 3.3"),
    _stated("algorithm.entropy_coefficient", 0.0, "eq. 8 has no such term"),
    _stated("algorithm.clip.low", 0.2, "section 4.1"),
    _stated("algorithm.clip.high", 0.28, "section 4.1"),
    _stated("algorithm.clip.dual", None, "eq. 8 has none"),
    _stated("algorithm.overlong.shape", "soft", "eq. 13"),
    _stated("algorithm.overlong.buffer", 4096, "section 4.1"),
    _stated("algorithm.overlong.factor", 1.0, "eq. 13"),
    _stated("algorithm.kl.coefficient", 0.0, "section 2.3"),
    _stated("algorithm.importance.mode", "none", "eq. 8 has none"),
    _stated("algorithm.dynamic_sampling.enabled", True, "eq. 11"),
    _stated("rollout.max_new_tokens", 20480, "section 4.1: 16384 and a buffer of 4096"),
    _stated("evaluation.samples", 32, "section 4.1"),
    _stated("evaluation.temperature", 1.0, "section 4.1"),
    _stated("evaluation.top_p", 0.7, "section 4.1"),
    _stated("actor.optimizer.lr", 1e-6, "section 4.1"),
    _stated("actor.optimizer.warmup_rollout_steps", 20.0, "section 4.1"),
    _stated("actor.optimizer.weight_decay", 0.1, _RECIPE),
    _stated("actor.optimizer.clip_norm", 1.0, _RECIPE),
)
"""In the order of the config's sections."""
