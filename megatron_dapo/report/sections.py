"""The curves of one run or two, as charts.yaml lists them: drawn, with legend, last values and a table of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as declared

from megatron_dapo.monitor.catalog import check_declared
from megatron_dapo.report.chart import Curve, Drawn, Frame, Unit, draw_curves, value_text
from megatron_dapo.report.evaluations import BESIDE, INSIDE, over_steps
from megatron_dapo.report.source import Run

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

    def points(self, run: Run, metric: str) -> dict[int, float]:
        """Rollout step -> value, of the steps that measured it."""
        known = ((line["rollout_step"], self._value(line, metric)) for line in run.lines)
        return {step: value for step, value in known if value is not None}

    def _value(self, line: Mapping[str, Any], metric: str) -> float | None:
        if not self.share_of:
            return line.get(metric)
        whole = sum(line.get(name) or 0 for name in self.share_of)
        return (line.get(metric) or 0) / whole if whole else None


@declared(frozen=True, kw_only=True, config=_STRICT)
class Section:
    key: str
    title: str
    lead: str
    charts: list[Chart]


@cache
def read_sections() -> list[Section]:
    """charts.yaml, every metric of it declared in the catalog."""
    sections = TypeAdapter(list[Section]).validate_python(yaml.safe_load(CHARTS.read_text(encoding="utf-8")))
    for section in sections:
        for chart in section.charts:
            check_declared([*chart.series, *chart.share_of])
    return sections


def draw_section(section: Section, runs: Sequence[Run]) -> tuple[list[Drawn], list[list[str]], list[str]]:
    """The charts that have something to show, [what, first, lowest, highest, last] of every series, and the titles of
    charts that no run measured anything of."""
    drawn: list[Drawn] = []
    numbers: list[list[str]] = []
    missing: list[str] = []
    for chart in section.charts:
        about = next(iter(chart.series))
        if any(chart.points(run, about) for run in runs):
            drawn += _draw(chart, runs, section.key, numbers)
        else:
            missing.append(chart.title)
    return drawn, numbers, missing


def has_paper_ranges(runs: Sequence[Run]) -> bool:
    """Whether the paper's figures are about models of this size."""
    return all(SIZE_32B[0] <= (run.parameters or 0) <= SIZE_32B[1] for run in runs)


def step_label(runs: Sequence[Run]) -> str:
    """The axis, with the optimizer steps that a rollout step holds."""
    each = {(line.get("optimizer_step") or 0) / line["rollout_step"] for run in runs for line in run.lines[-1:]}
    if len(each) == 1 and (number := each.pop()) > 0:
        exact = f"{number:.0f}" if number == int(number) else f"{number:.1f} on average"
        return f"rollout step, {exact} optimizer steps each"
    return "rollout step"


def _draw(chart: Chart, runs: Sequence[Run], key: str, numbers: list[list[str]]) -> list[Drawn]:
    """One chart; of stacks of two runs a chart a run, for layers of two runs cannot lie on each other. `numbers` gets a
    row a series."""
    band = chart.band if has_paper_ranges(runs) else None
    frame = replace(chart, x_label=step_label(runs), last=max(run.steps for run in runs), band=band)
    drawn = []
    for group in [[run] for run in runs] if chart.stack else [runs]:
        title = f"{chart.title}: {group[0].name}" if len(group) < len(runs) else chart.title
        curves: list[Curve] = []
        for at, measured in enumerate(_curves(chart, group)):
            for curve in measured:
                figures = (curve.values[0], min(curve.values), max(curve.values), curve.values[-1])
                numbers.append([f"{title}, {curve.label}", *(value_text(value, chart.unit) for value in figures)])
            if at == 0 or any(any(curve.values) for curve in measured):
                curves += measured  # a series that is all zero beside another one says nothing
        if curves:
            drawn.append(draw_curves(curves, replace(frame, title=title), salt=f"{key} {title}"))
    return drawn


def _curves(chart: Chart, runs: Sequence[Run]) -> list[list[Curve]]:
    """Of each series the runs that measured it. One run: a colour a series. Two: a colour a run, a dash a series."""
    series: list[list[Curve]] = []
    for at, (metric, label) in enumerate(chart.series.items()):
        own = chart.colours[at] if chart.colours else at
        measured = []
        for number, run in enumerate(runs):
            if points := chart.points(run, metric):
                name, colour, dash = (label, own, 0) if len(runs) == 1 else (f"{run.name}: {label}", number, at)
                values = list(points.values())
                measured.append(Curve(label=name, steps=list(points), values=values, colour=colour, dash=dash))
        series.append(measured)
    return series


def draw_evaluations(run: Run, salt: str) -> list[Drawn]:
    """A chart of the evaluations inside the run, and of those beside it, where there are two steps or more."""
    last = max([run.steps, *(each.step or 0 for each in run.evaluations)])
    drawn = []
    for where in (BESIDE, INSIDE):
        curves = []
        for colour, (label, points) in enumerate(over_steps(run.evaluations, where).items()):
            steps, values, low, high = zip(*points, strict=True)
            curves.append(Curve(label=label, steps=steps, values=values, colour=colour, low=low, high=high))
        if any(len(curve.steps) > 1 for curve in curves):
            note = f"Evaluations {where}; pale: 95% intervals over problems."
            frame = Frame(title="Over the training", note=note, unit=Unit.SHARE, first=0, last=last, to_one=True)
            drawn.append(draw_curves(curves, frame, salt=f"{salt} {where}"))
    return drawn
