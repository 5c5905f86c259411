"""The curves of one run or two, as charts.yaml lists them: drawn, with legend, last values and a table of numbers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as declared

from megatron_dapo.monitor.writer import series, shares
from megatron_dapo.report.chart import Curve, Drawn, Frame, Unit, draw_curves, value_text
from megatron_dapo.report.source import BESIDE, INSIDE, SAMPLED, Evaluation, Run

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

    def curves(self, runs: Sequence[Run]) -> list[list[Curve]]:
        """Each series of the runs that measured it. One run has a colour a series, two a colour a run and a dash a
        series."""
        found: list[list[Curve]] = [[] for _ in self.series]
        for number, run in enumerate(runs):
            lines = shares(run.lines, self.share_of) if self.share_of else run.lines
            for at, (metric, label) in enumerate(self.series.items()):
                steps, values = series(lines, metric)
                name, colour, dash = f"{run.name}: {label}", number, at
                if len(runs) == 1:
                    name, colour, dash = label, (self.colours or range(len(self.series)))[at], 0
                if steps:
                    found[at].append(Curve(label=name, steps=steps, values=values, colour=colour, dash=dash))
        return found


@declared(frozen=True, kw_only=True, config=_STRICT)
class Section:
    key: str
    title: str
    lead: str
    charts: list[Chart]


@cache
def read_sections() -> list[Section]:
    return TypeAdapter(list[Section]).validate_python(yaml.safe_load(CHARTS.read_text(encoding="utf-8")))


def own_charts(section: Section, runs: Sequence[Run]) -> list[Chart]:
    """In section `update`, a chart of each statistic that the policy loss names itself."""
    names = sorted({name for run in runs for line in run.lines[-1:] for name in line if name.startswith("objective/")})
    note = "Of the policy loss: mean over the tokens that carry loss."
    charts = [Chart(title=name.partition("/")[2], note=note, series={name: "mean"}) for name in names]
    return charts if section.key == "update" else []


def draw_section(section: Section, runs: Sequence[Run]) -> tuple[list[Drawn], list[list[str]], list[str]]:
    """The charts that have something to show, [what, first, lowest, highest, last] of every series, and the titles of
    charts that no run measured anything of."""
    drawn: list[Drawn] = []
    numbers: list[list[str]] = []
    missing: list[str] = []
    for chart in (*section.charts, *own_charts(section, runs)):
        if not chart.curves(runs)[0]:
            missing.append(chart.title)
            continue
        band = chart.band if has_paper_ranges(runs) else None
        frame = replace(chart, x_label=step_label(runs), last=max(run.steps for run in runs), band=band)
        # Layers of two runs cannot lie on each other: a chart a run.
        for group in [[run] for run in runs] if chart.stack else [runs]:
            title = f"{chart.title}: {group[0].name}" if len(group) < len(runs) else chart.title
            first, *others = chart.curves(group)
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


def draw_evaluations(run: Run, salt: str) -> list[Drawn]:
    """A chart of the evaluations inside the run, and of those beside it, where there are two steps or more."""
    last = max([run.steps, *(each.step or 0 for each in run.evaluations)])
    drawn = []
    for where in (BESIDE, INSIDE):
        curves = _over_steps([each for each in run.evaluations if each.where == where and each.step is not None])
        if any(len(curve.steps) > 1 for curve in curves):
            note = f"Evaluations {where}; pale: 95% intervals over problems."
            frame = Frame(title="Over the training", note=note, unit=Unit.SHARE, first=0, last=last, to_one=True)
            drawn.append(draw_curves(curves, frame, salt=f"{salt} {where}"))
    return drawn


def _over_steps(evaluations: Sequence[Evaluation]) -> list[Curve]:
    """Their figures with intervals: of sampled answers, where there are any, else of greedy ones."""
    sampled = {each.name for each in evaluations if each.way == SAMPLED}
    found: dict[str, list[tuple[Any, ...]]] = {}
    for each in evaluations:
        if each.way == SAMPLED or each.name not in sampled:
            for name, figure in each.figures.items():
                point = (each.step, figure.value, figure.low, figure.high)
                found.setdefault(f"{name}, {each.way}", []).append(point)
    curves = []
    for colour, (label, points) in enumerate(found.items()):
        steps, values, low, high = zip(*points, strict=True)
        curves.append(Curve(label=label, steps=steps, values=values, colour=colour, low=low, high=high))
    return curves
