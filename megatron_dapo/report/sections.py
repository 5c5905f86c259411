"""The curves of the runs, as charts.yaml lists them: drawn, with legend, last values and a table of numbers. Runs that
differ by their seed alone are one line with a band."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from statistics import fmean

import yaml
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as declared

from megatron_dapo.config.load import flatten
from megatron_dapo.report.chart import SERIES_COLOURS, Curve, Drawn, Frame, draw_curves, value_text
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


CHARTS = Path(__file__).with_name("charts.yaml")
SIZE_32B = (30e9, 35e9)
"""Parameters of a model to which the ranges of the paper's figures apply: Qwen2.5-32B has 32.8 billion."""

_STRICT = ConfigDict(extra="forbid")


@declared(frozen=True, kw_only=True, config=_STRICT)
class Chart(Frame):
    """One chart as charts.yaml declares it; the head of that file says what the fields mean."""

    series: dict[str, str]
    share_of: tuple[str, ...] = ()
    colours: tuple[int, ...] = ()
    vital: bool = False
    """Its first series stands on the first screen, as a sign of health."""

    def curves(self, groups: Sequence[Group]) -> list[list[Curve]]:
        """As `overlay`: each series of the groups that measured it."""
        return overlay(groups, self._measured, self.colours)

    def _measured(self, run: Run) -> Mapping[str, Points]:
        points: dict[str, dict[int, Point]] = {label: {} for label in self.series.values()}
        for line in run.lines:
            whole = sum(line.get(name) or 0 for name in self.share_of) if self.share_of else 1
            for name, label in self.series.items():
                if whole and line.get(name) is not None:
                    points[label][line["rollout_step"]] = (line[name] / whole,) * 3
        return points


@declared(frozen=True, kw_only=True, config=_STRICT)
class Section:
    key: str
    title: str
    lead: str
    charts: list[Chart]
    open: bool = True
    """Else its content is shown on a click."""


@cache
def read_sections() -> list[Section]:
    return TypeAdapter(list[Section]).validate_python(yaml.safe_load(CHARTS.read_text(encoding="utf-8")))


OWN = {
    "update": (("objective/",), "Of the policy loss: mean over the tokens that carry loss."),
    "training": (("reward/", "episode/"), "One of several rewards, +1 or -1 without its weight; or of episodes."),
}
"""Section -> (beginnings, note) of metrics that a loss or a config names itself."""


def own_charts(section: Section, runs: Sequence[Run]) -> list[Chart]:
    """A chart of each metric of `OWN` that no chart of the section shows."""
    if section.key not in OWN:
        return []
    begin, note = OWN[section.key]
    shown = {name for chart in section.charts for name in chart.series}
    found = {name for run in runs for line in run.lines[-1:] for name in line if name.startswith(begin)}
    return [Chart(title=name, note=note, series={name: "mean"}) for name in sorted(found - shown)]


def draw_section(
    section: Section, groups: Sequence[Group], smooth: int
) -> tuple[list[Drawn], list[list[str]], list[str]]:
    """The charts that have something to show, [what, first, lowest, highest, last] of every series, and the titles of
    charts that no run measured anything of. `smooth`: as Frame's."""
    drawn: list[Drawn] = []
    numbers: list[list[str]] = []
    missing: list[str] = []
    runs = [run for group in groups for run in group.runs]
    for chart in (*section.charts, *own_charts(section, runs)):
        if not chart.curves(groups)[0]:
            missing.append(chart.title)
            continue
        band, last = chart.band if has_paper_ranges(runs) else None, max(run.steps for run in runs)
        frame = replace(chart, last=last, band=band, smooth=smooth)
        # Layers of two groups cannot lie on each other: a chart a group.
        for some in [[group] for group in groups] if chart.stack else [groups]:
            title = f"{chart.title}: {some[0].name}" if len(some) < len(groups) else chart.title
            first, *others = chart.curves(some)
            for curve in chain(first, *others):
                figures = (curve.values[0], min(curve.values), max(curve.values), curve.values[-1])
                numbers.append([f"{title}, {curve.label}", *(value_text(value, chart.unit) for value in figures)])
            # A series that is all zero beside another one says nothing.
            told = [one for one in others if any(any(curve.values) for curve in one)]
            if curves := list(chain(first, *told)):
                drawn.append(draw_curves(curves, replace(frame, title=title), salt=f"{section.key} {title}"))
    return drawn, numbers, missing


def has_paper_ranges(runs: Sequence[Run]) -> bool:
    """Whether the paper's figures are about models of this size."""
    return all(SIZE_32B[0] <= (run.parameters or 0) <= SIZE_32B[1] for run in runs)


def draw_evaluations(groups: Sequence[Group], where: str, ways: Sequence[str] = ()) -> list[Drawn]:
    """Accuracy on held-out problems over the training, with intervals or, of several seeds, from lowest to highest;
    nothing where none was measured.

    Args:
        where: inside the runs or beside them.
        ways: of answering, whose averages are wanted; none: all figures (avg@n, pass@n, cons@n), from two steps on.
    """
    curves = list(chain(*overlay(groups, partial(_figures, where=where, ways=ways))))
    if not curves or not (ways or any(len(curve.steps) > 1 for curve in curves)):
        return []
    note = f"Evaluations {where}; pale: 95% intervals, of several seeds from the lowest to the highest."
    last = max(curve.steps[-1] for curve in curves)
    frame = Frame(title="Held-out accuracy", note=note, unit="share", first=0, last=last, to_one=True, marks=True)
    return [draw_curves(curves, frame, salt=f"evaluated {where} {ways}")]


def _figures(run: Run, where: str, ways: Sequence[str]) -> Mapping[str, Points]:
    found: dict[str, dict[int, Point]] = {}
    for each in run.evaluations:
        for name, figure in each.figures.items():
            if each.where == where and each.step is not None and (not ways or (each.way in ways and "avg" in name)):
                label = each.way if ways else f"{name}, {each.way}"
                found.setdefault(label, {})[each.step] = (figure.value, figure.low, figure.high)
    return found
