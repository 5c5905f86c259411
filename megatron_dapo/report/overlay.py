"""Runs over each other: those that differ by their seed alone are one line with a band."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from megatron_dapo.config.load import flatten
from megatron_dapo.report.chart import SERIES_COLOURS, Curve
from megatron_dapo.report.source import Run

OWN_KEYS = ("run.dir", "run.seed", "run.resume", "monitor.", "evaluation.every")
"""What keys begin with in which runs of one group may differ: seed, place, and what is watched."""

Point = tuple[float, float, float]
"""A value and its 95% interval; the value three times where it has none."""
Points = Mapping[int, Point]
"""By rollout step."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ by their seed alone; most often one run."""

    name: str
    runs: Sequence[Run]
    colour: int

    def total(self, name: str) -> float:
        """Sum of a metric over the runs; 0 where it was never measured."""
        return sum(run.total(name) for run in self.runs)


def group_by_seed(runs: Sequence[Run]) -> list[Group]:
    """In the order of the first run of each. Runs of one config and one seed stay apart, as do those without config."""
    alike: dict[tuple[str, int], list[Run]] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        shared = [(key, str(value)) for key, value in flatten(run.config).items() if not key.startswith(OWN_KEYS)]
        config = str(sorted(shared))
        with_seed = f"{config} {run.setting('run.seed')}"
        alike.setdefault((config, seen[with_seed]), []).append(run)
        seen[with_seed] += 1
    named = [(_common_name(group), group) for group in alike.values()]
    times = Counter(name for name, _ in named)
    named = [(name if times[name] == 1 else f"{group[0].name}: {name}", group) for name, group in named]
    return [Group(name=name, runs=group, colour=at % SERIES_COLOURS) for at, (name, group) in enumerate(named)]


def _common_name(runs: Sequence[Run]) -> str:
    """`quickstart (3 seeds)` of `quickstart-seed0`, `quickstart-seed1`, ..."""
    without_seed = re.sub(r"[-_./](seed|s)?[-_.]?\d+$", "", runs[0].name)
    return f"{without_seed} ({len(runs)} seeds)" if len(runs) > 1 else runs[0].name


def overlay(
    groups: Sequence[Group], measured: Callable[[Run], Mapping[str, Points]], colours: Sequence[int] = ()
) -> list[list[Curve]]:
    """Of each series the curves of the groups that measured it. One group has a colour a series, several a colour a
    group and a dash a series. Of several runs: their mean, and from the lowest to the highest, at the steps of all."""
    found = [[measured(run) for run in group.runs] for group in groups]
    labels = dict.fromkeys(chain.from_iterable(chain.from_iterable(found)))
    curves: list[list[Curve]] = [[] for _ in labels]
    for at, label in enumerate(labels):
        for group, runs in zip(groups, found, strict=True):
            name = f"{group.name}: {label}" if len(labels) > 1 else group.name
            colour, dash = group.colour, at
            if len(groups) == 1:
                name, colour, dash = label, colours[at] if colours else at % SERIES_COLOURS, 0
            known = [run[label] for run in runs if run.get(label)]
            steps = sorted(set.intersection(*map(set, known))) if known else []
            if not steps:
                continue
            mean, low, high = zip(*(_spread([run[step] for run in known]) for step in steps), strict=True)
            band = {} if mean == low == high else {"low": low, "high": high}
            curves[at].append(Curve(label=name, steps=steps, values=mean, colour=colour, dash=dash, **band))
    return curves


def _spread(points: Sequence[Point]) -> Point:
    """One run's point; of several runs the mean, the lowest and the highest value."""
    values = [value for value, _, _ in points]
    return points[0] if len(points) == 1 else (fmean(values), min(values), max(values))
