"""Section `monitor`: what is watched and when it stops a run."""

from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import STRICT, NonNegativeInt, PositiveFloat


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MonitorConfig:
    tensorboard: bool = True
    """Write every metric to `<run.dir>/tensorboard` as well."""

    mismatch_warn: PositiveFloat = 0.05
    """Mean |engine - trainer| log-prob of a step above which a warning is printed."""

    mismatch_stop: PositiveFloat = 1.0
    """The same, above which the run stops: the two sides no longer hold the same model."""

    sample_responses: NonNegativeInt = 2
    """Responses of each step that are kept as text in `<run.dir>/samples.jsonl`; and as many again of those on which
    the rules `exact` and `robust` disagree."""
