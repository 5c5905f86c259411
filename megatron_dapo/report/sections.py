"""The curves of one run or two, as charts.yaml lists them: drawn, with legend, last values and a table of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as declared

from megatron_dapo.monitor.catalog import check_declared
from megatron_dapo.report.chart import Curve, Frame, Unit, draw_curves, spoken
from megatron_dapo.report.source import Run

CHARTS = Path(__file__).with_name("charts.yaml")
SIZE_32B = (30e9, 35e9)
"""Parameters of a model to which the ranges of the paper's figures apply: Qwen2.5-32B has 32.8 billion."""

_STRICT = ConfigDict(extra="forbid")
Points = Mapping[int, float]
"""Rollout step -> value, of the steps that measured it."""


@declared(frozen=True, kw_only=True, config=_STRICT)
class Chart:
    """One chart as charts.yaml declares it; the head of that file says what the fields mean."""

    key: str
    title: str
    note: str
    series: dict[str, str]
    unit: Unit = Unit.NUMBER
    share_of: list[str] = Field(default_factory=list)
    colours: list[int] = Field(default_factory=list)
    figure: str = ""
    band: tuple[float, float] | None = None
    to_one: bool = False
    from_zero: bool = True
    stack: bool = False

    def points(self, run: Run, metric: str) -> Points:
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


@dataclass(frozen=True, kw_only=True)
class Key:
    """One entry of a legend."""

    label: str
    colour: int
    dash: int = 0
    latest: str


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One chart on the page."""

    title: str
    note: str
    figure: str = ""
    band: str = ""
    """What the shaded range is; empty where there is none."""
    svg: Markup
    legend: list[Key]


@dataclass(frozen=True, kw_only=True)
class DrawnSection:
    section: Section
    charts: list[Drawn]
    missing: list[str]
    """Titles of charts that no run measured anything of."""
    numbers: list[list[str]]
    """[what, first, lowest, highest, last] of every series."""


def draw_sections(runs: Sequence[Run]) -> list[DrawnSection]:
    """All sections, each with the charts that have something to show."""
    drawn = []
    for section in read_sections():
        about = {chart.key: next(iter(chart.series)) for chart in section.charts}
        shown = [chart for chart in section.charts if any(chart.points(run, about[chart.key]) for run in runs)]
        drawn.append(
            DrawnSection(
                section=section,
                charts=[each for chart in shown for each in _draw(chart, runs)],
                missing=[chart.title for chart in section.charts if chart not in shown],
                numbers=[row for chart in shown for row in _numbers(chart, runs)],
            )
        )
    return drawn


def has_paper_ranges(run: Run) -> bool:
    """Whether the paper's figures are about a model of this size."""
    return run.parameters is not None and SIZE_32B[0] <= run.parameters <= SIZE_32B[1]


def step_label(runs: Sequence[Run]) -> str:
    """The axis, with the optimizer steps that a rollout step holds."""
    each = {(line.get("optimizer_step") or 0) / line["rollout_step"] for run in runs for line in run.lines[-1:]}
    if len(each) == 1 and (number := each.pop()) > 0:
        exact = f"{number:.0f}" if number == int(number) else f"{number:.1f} on average"
        return f"rollout step, {exact} optimizer steps each"
    return "rollout step"


def _draw(chart: Chart, runs: Sequence[Run]) -> list[Drawn]:
    """One run: a colour a series. Two runs: a colour a run, a dash a series; of stacks a chart a run, for layers of two
    runs cannot lie on each other."""
    band = chart.band if all(has_paper_ranges(run) for run in runs) else None
    shaded = f"Shaded: what figure {chart.figure} of the paper spans for Qwen2.5-32B." if band else ""
    frame = Frame(
        unit=chart.unit,
        x_label=step_label(runs),
        last=max(run.steps for run in runs),
        from_zero=chart.from_zero,
        to_one=chart.to_one,
        stack=chart.stack,
        band=band,
    )
    drawn = []
    for number, group in enumerate([[run] for run in runs] if chart.stack else [runs]):
        curves, legend = _curves(chart, group)
        if curves:
            named = chart.stack and len(runs) > 1
            title = f"{chart.title}: {group[0].name}" if named else chart.title
            svg = Markup(draw_curves(curves, frame, salt=f"{chart.key}{number}"))
            drawn.append(Drawn(title=title, note=chart.note, figure=chart.figure, band=shaded, svg=svg, legend=legend))
    return drawn


def _curves(chart: Chart, runs: Sequence[Run]) -> tuple[list[Curve], list[Key]]:
    found = [[chart.points(run, metric) for metric in chart.series] for run in runs]
    curves, legend = [], []
    for number, run in enumerate(runs):
        for at, (label, points) in enumerate(zip(chart.series.values(), found[number], strict=True)):
            if not points or (at and not any(value for each in found for value in each[at].values())):
                continue  # a series that is all zero beside another one says nothing
            own = chart.colours[at] if chart.colours else at
            colour, dash = (number, at) if len(runs) > 1 else (own, 0)
            values = list(points.values())
            curves.append(Curve(steps=list(points), values=values, colour=colour, dash=dash))
            name = label if len(runs) == 1 else f"{run.name}: {label}"
            legend.append(Key(label=name, colour=colour, dash=dash, latest=spoken(values[-1], chart.unit)))
    return curves, legend


def _numbers(chart: Chart, runs: Sequence[Run]) -> list[list[str]]:
    rows = []
    for run in runs:
        for metric, label in chart.series.items():
            values = list(chart.points(run, metric).values())
            if values:
                name = f"{chart.title}, {label}" + (f" ({run.name})" if len(runs) > 1 else "")
                figures = (values[0], min(values), max(values), values[-1])
                rows.append([name, *(spoken(value, chart.unit) for value in figures)])
    return rows
