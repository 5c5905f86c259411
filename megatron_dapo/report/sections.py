"""The curves of the runs, as charts.yaml lists them: drawn, with legend, last values and a table of numbers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path

import yaml
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as declared

from megatron_dapo.monitor.statistics import Estimate
from megatron_dapo.monitor.writer import Line, series, shares
from megatron_dapo.report.chart import Curve, Drawn, Frame, Unit, draw_curves, value_text
from megatron_dapo.report.overlay import Group, Points, overlay
from megatron_dapo.report.source import BESIDE, INSIDE, SAMPLED, Run

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

    def curves(self, groups: Sequence[Group]) -> list[list[Curve]]:
        """As `overlay`: each series of the groups that measured it."""
        return overlay(groups, self._measured, self.colours)

    def _measured(self, run: Run) -> dict[str, Points]:
        lines = shares(run.lines, self.share_of) if self.share_of else run.lines
        return {label: _without_interval(lines, metric) for metric, label in self.series.items()}


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


def draw_section(
    section: Section, groups: Sequence[Group], smooth: int
) -> tuple[list[Drawn], list[list[str]], list[str]]:
    """The charts that have something to show, [what, first, lowest, highest, last] of every series, and the titles of
    charts that no run measured anything of. `smooth`: as Frame's."""
    drawn: list[Drawn] = []
    numbers: list[list[str]] = []
    missing: list[str] = []
    runs = [run for group in groups for run in group.runs]
    for chart in section.charts:
        if not chart.curves(groups)[0]:
            missing.append(chart.title)
            continue
        band, last = chart.band if has_paper_ranges(runs) else None, max(run.steps for run in runs)
        frame = replace(chart, x_label=step_label(runs), last=last, band=band, smooth=smooth)
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


def step_label(runs: Sequence[Run]) -> str:
    """The axis, with the optimizer steps that a rollout step holds."""
    each = {(line.get("optimizer_step") or 0) / line["rollout_step"] for run in runs for line in run.lines[-1:]}
    if len(each) == 1 and (number := each.pop()) > 0:
        exact = f"{number:.0f}" if number == int(number) else f"{number:.1f} on average"
        return f"rollout step, {exact} optimizer steps each"
    return "rollout step"


def draw_held_out(groups: Sequence[Group], ways: Sequence[str], salt: str) -> list[Drawn]:
    """Accuracy on held-out problems before, during and after training; nothing where none is measured."""
    curves = list(chain(*overlay(groups, lambda run: {way: held_out_points(run, way) for way in ways})))
    spread = {"lowest to highest seed" if len(group.runs) > 1 else "95% interval" for group in groups}
    note = f"Right answers, {' and '.join(ways)}; pale: {' or '.join(sorted(spread))}."
    return [_evaluation_chart("Held-out accuracy", note, curves, salt)] if curves else []


def held_out_points(run: Run, way: str) -> Points:
    """From the metrics and, with intervals, from the evaluations' own files and the summary."""
    points = dict(_without_interval(run.lines, f"evaluation/{way}"))
    for each in run.evaluations:
        if (each.way, each.where) == (way, INSIDE) and each.step is not None and each.step <= run.steps:
            points[each.step] = _point(next(iter(each.figures.values())))
    for stage, step in (("before", 0), ("after", run.steps)):
        if found := run.held_out.get(way, {}).get(stage):
            points[step] = (found.accuracy, found.low, found.high)
    return points


def draw_evaluations(groups: Sequence[Group]) -> list[Drawn]:
    """avg, pass and cons of the evaluations inside the runs, and of those beside them, where there are two steps or
    more and, inside, more than one answer a problem: else it is the chart of held-out accuracy."""
    drawn = []
    for where in (BESIDE, INSIDE):
        curves = list(chain(*overlay(groups, partial(_figures, where=where))))
        if any(len(curve.steps) > 1 for curve in curves):
            note = f"Evaluations {where}; pale: intervals, or lowest to highest seed."
            drawn.append(_evaluation_chart("Over the training", note, curves, where))
    return drawn


def _figures(run: Run, where: str) -> dict[str, Points]:
    """Figures of sampled answers, where there are any, else of greedy ones."""
    here = [each for each in run.evaluations if each.where == where and each.step is not None]
    sampled = {each.name for each in here if each.way == SAMPLED}
    found: dict[str, dict[int, tuple[float, float, float]]] = {}
    for each in here:
        if each.way == SAMPLED or each.name not in sampled:
            for name, figure in each.figures.items():
                found.setdefault(f"{name}, {each.way}", {})[each.step or 0] = _point(figure)
    return {} if where == INSIDE and not any(name.startswith("pass") for name in found) else found


def _evaluation_chart(title: str, note: str, curves: Sequence[Curve], salt: str) -> Drawn:
    last = max(curve.steps[-1] for curve in curves)
    frame = Frame(title=title, note=note, unit=Unit.SHARE, first=0, last=last, to_one=True, marks=True)
    return draw_curves(curves, frame, salt=f"evaluated {salt}")


def _without_interval(lines: Sequence[Line], metric: str) -> Points:
    return {step: (value, value, value) for step, value in zip(*series(lines, metric), strict=True)}


def _point(figure: Estimate) -> tuple[float, float, float]:
    return figure.value, figure.low, figure.high
