"""What the runs that are left will cost: from the runs that are done, or else from one that was measured."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from examples.ablation.rungs import Planned, Switch
from examples.ablation.runs import SECONDS, State


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds of one run: `fixed` whatever its length (start, held-out problems, end), and `step` a rollout step."""

    fixed: float
    step: float


MEASURED = Pace(fixed=0.0, step=0.0)
DYNAMIC_FACTOR = 2.4
"""Rollouts of a step with dynamic sampling against one without, where no run with it is done yet: as many more tokens
were generated in the runs of README.md."""

BASE_S = 0.0
"""Making one seed's base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    seconds: float
    runs: int
    rests_on: str
    """What was measured."""


def estimate(runs: Sequence[Planned], states: Sequence[State], *, bases: int) -> Estimate:
    """Seconds that are left.

    Args:
        states: where each of `runs` stands.
        bases: bases that are still to be made.
    """
    paces = {dynamic: _pace([run for run in runs if _is_dynamic(run) == dynamic]) for dynamic in (False, True)}
    plain = paces[False] or MEASURED
    dynamic = paces[True] or Pace(fixed=plain.fixed, step=plain.step * DYNAMIC_FACTOR)
    left = [run for run, state in zip(runs, states, strict=True) if state in (State.NEW, State.HALF)]
    seconds = BASE_S * bases
    for run in left:
        pace = dynamic if _is_dynamic(run) else plain
        seconds += pace.fixed + pace.step * run.config().run.rollout_steps
    known = sum((run.folder / SECONDS).exists() for run in runs)
    rests_on = f"{known} runs done here" if known else "one run measured on two cores (README.md)"
    return Estimate(seconds=seconds, runs=len(left), rests_on=rests_on)


def _is_dynamic(run: Planned) -> bool:
    return Switch.DYNAMIC in run.rung.on


def _pace(runs: Sequence[Planned]) -> Pace | None:
    """Of the finished ones among `runs`; None without any."""
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
