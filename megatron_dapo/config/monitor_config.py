"""Section `monitor`: what is watched and when it stops a run."""

from typing import Literal

from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import STRICT, NonNegativeInt, PositiveFloat, Text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WandbConfig:
    mode: Literal["off", "offline", "online"] = "off"
    """Send every metric to Weights & Biases too; `offline` keeps it in `<run.dir>/wandb` for `wandb sync`. Needs the
    package: pip install 'megatron-dapo[wandb]'."""

    project: Text = "megatron-dapo"
    """Project there."""

    entity: Text | None = None
    """User or team there; none: the key's own."""

    name: Text | None = None
    """Name of the run there; none: that of the run directory."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MonitorConfig:
    tensorboard: bool = True
    """Write every metric to `<run.dir>/tensorboard` as well."""

    wandb: WandbConfig = WandbConfig()

    timeline_every: NonNegativeInt = 0
    """Record phases, requests, micro-batches and memory peaks in `<run.dir>/timeline` every so many rollout steps, for
    `tools/profile_throughput.py`. 0: never."""

    mismatch_warn: PositiveFloat = 0.05
    """Mean |engine - trainer| log-prob of a step above which a warning is printed."""

    mismatch_stop: PositiveFloat = 1.0
    """The same, above which the run stops. If older weights wrote all tokens (`async`), these are compared."""

    sample_responses: NonNegativeInt = 2
    """Responses of each step kept as text in `<run.dir>/samples.jsonl`, and as many of those without a verdict or on
    which `exact` and `robust` disagree."""
