"""How two configs differ, and how one differs from the paper (arXiv 2503.14476).

Works on plain trees, so also on an old run's config.

The paper's settings stand here a second time on purpose: a default that is changed by mistake shows as a difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from megatron_dapo.config.load import flatten
from megatron_dapo.config.root import Config

ABSENT = "(no such key)"


class Stated(NamedTuple):
    """One setting that the paper states."""

    key: str
    value: Any
    where: str
    """Equation or section of the paper, or what else states it."""


_RECIPE = "published recipe; the paper names none"

PAPER: tuple[Stated, ...] = (
    Stated("algorithm.prompts_per_step", 512, "section 4.1"),
    Stated("algorithm.group_size", 16, "section 4.1"),
    Stated("algorithm.mini_batch_responses", 512, "section 4.1: 16 updates a rollout step"),
    Stated("algorithm.aggregation", "token_mean", "eq. 8, section 3.3"),
    Stated("algorithm.entropy_coefficient", 0.0, "eq. 8 has no such term"),
    Stated("algorithm.clip.low", 0.2, "section 4.1"),
    Stated("algorithm.clip.high", 0.28, "section 4.1"),
    Stated("algorithm.clip.dual", None, "eq. 8 has none"),
    Stated("algorithm.overlong.shape", "soft", "eq. 13"),
    Stated("algorithm.overlong.buffer", 4096, "section 4.1"),
    Stated("algorithm.overlong.factor", 1.0, "eq. 13"),
    Stated("algorithm.kl.coefficient", 0.0, "section 2.3"),
    Stated("algorithm.importance.mode", "none", "eq. 8 has none"),
    Stated("algorithm.dynamic_sampling.enabled", True, "eq. 11"),
    Stated("rollout.max_new_tokens", 20480, "section 4.1: 16384 and a buffer of 4096"),
    Stated("evaluation.samples", 32, "section 4.1"),
    Stated("evaluation.temperature", 1.0, "section 4.1"),
    Stated("evaluation.top_p", 0.7, "section 4.1"),
    Stated("actor.optimizer.lr", 1e-6, "section 4.1"),
    Stated("actor.optimizer.warmup_rollout_steps", 20.0, "section 4.1"),
    Stated("actor.optimizer.weight_decay", 0.1, _RECIPE),
    Stated("actor.optimizer.clip_norm", 1.0, _RECIPE),
)
"""In the order of the config's sections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One key that two configs set differently."""

    key: str
    one: Any
    other: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """One key that a config sets otherwise than the paper."""

    stated: Stated
    value: Any


def flatten_config(config: Config) -> dict[str, Any]:
    """Every key of a loaded config with its value, defaults filled in."""
    return flatten(TypeAdapter(Config).dump_python(config, mode="json"))


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Keys whose values differ, in the order of `one`; a key that only one side has counts."""
    keys = [*one, *(key for key in other if key not in one)]
    return [
        Difference(key=key, one=one.get(key, ABSENT), other=other.get(key, ABSENT))
        for key in keys
        if one.get(key, ABSENT) != other.get(key, ABSENT)
    ]


def departures(flat: Mapping[str, Any]) -> list[Departure]:
    """Keys that the paper states and `flat` sets otherwise."""
    return [
        Departure(stated=stated, value=flat.get(stated.key, ABSENT))
        for stated in PAPER
        if flat.get(stated.key, ABSENT) != stated.value
    ]


def shown(value: Any) -> str:
    """A value as it is written in a config file."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)
