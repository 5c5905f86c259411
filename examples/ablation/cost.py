"""What the runs that are left will cost, from the runs that are done on this machine."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from examples.ablation.rungs import Planned
from examples.ablation.runs import SECONDS, State

DYNAMIC_FACTOR = 2.4
"""Seconds of a rollout step with dynamic sampling against one without, where no run with it is done yet. An assumption,
about as many more responses as are generated; the first such run replaces it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds of one run: `fixed` whatever its length (start, held-out problems, end), and `step` a rollout step."""

    fixed: float
    step: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    seconds: float
    measured: int
    """Runs that it rests on."""


def estimate(runs: Sequence[Planned], states: Sequence[State]) -> Estimate | None:
    """Seconds that are left, bases not counted; None until one run is done.

    Args:
        states: where each of `runs` stands.
    """
    dynamic = _pace([run for run in runs if _is_dynamic(run)])
    plain = _pace([run for run in runs if not _is_dynamic(run)])
    if plain is None and dynamic is None:
        return None
    if plain is None:
        assert dynamic is not None
        plain = Pace(fixed=dynamic.fixed, step=dynamic.step / DYNAMIC_FACTOR)
    if dynamic is None:
        dynamic = Pace(fixed=plain.fixed, step=plain.step * DYNAMIC_FACTOR)
    seconds = 0.0
    for run, state in zip(runs, states, strict=True):
        if state in (State.NEW, State.HALF):
            pace = dynamic if _is_dynamic(run) else plain
            seconds += pace.fixed + pace.step * run.config().run.rollout_steps
    return Estimate(seconds=seconds, measured=sum((run.folder / SECONDS).exists() for run in runs))


def _is_dynamic(run: Planned) -> bool:
    return run.config().algorithm.dynamic_sampling.filter == "refill"


def _pace(runs: Sequence[Planned]) -> Pace | None:
    """Mean of the finished ones among `runs`; None without any."""
    fixed, steps = [], []
    for run in runs:
        try:
            wall = json.loads((run.folder / SECONDS).read_text())["wall"]
            summary = json.loads((run.folder / "summary.json").read_text())
        except (OSError, ValueError, KeyError):
            continue
        training = summary["seconds"]["step"]
        fixed.append(max(0.0, wall - training))
        steps.append(training / summary["rollout_steps"])
    return Pace(fixed=sum(fixed) / len(fixed), step=sum(steps) / len(steps)) if fixed else None
