"""The sections' charts for one or two runs: drawn, with legend, last values and a table of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from megatron_dapo.report.chart import Curve, Frame, Unit, draw_curves, draw_stack, spoken
from megatron_dapo.report.figures import SECTIONS, Chart, Section
from megatron_dapo.report.source import Run

SIZE_32B = (30e9, 35e9)
"""Parameters of a model to which the ranges of the paper's figures apply: Qwen2.5-32B has 32.8 billion."""

Points = tuple[list[int], list[float]]


@dataclass(frozen=True, kw_only=True)
class Key:
    """One entry of a legend."""

    label: str
    colour: int
    dash: int
    latest: str


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One chart on the page."""

    title: str
    note: str
    figure: str
    band: str
    """What the shaded range is; empty where there is none."""
    svg: Markup
    legend: list[Key]


@dataclass(frozen=True, kw_only=True)
class DrawnSection:
    key: str
    title: str
    lead: str
    charts: list[Drawn]
    missing: list[str]
    """Titles of charts that no run measured anything of."""
    numbers: list[tuple[str, list[str]]]
    """(what, [first, lowest, highest, last]) for every series."""


def draw_sections(runs: Sequence[Run]) -> list[DrawnSection]:
    """All sections, each with the charts that have something to show."""
    return [_section(section, runs) for section in SECTIONS]


def has_paper_ranges(run: Run) -> bool:
    """Whether the paper's figures are about a model of this size."""
    return run.parameters is not None and SIZE_32B[0] <= run.parameters <= SIZE_32B[1]


def step_label(runs: Sequence[Run]) -> str:
    """The axis, with the optimizer steps that a rollout step holds."""
    each = {(line.get("optimizer_step") or 0) / line["rollout_step"] for run in runs for line in run.lines[-1:] if line}
    if len(each) == 1 and (number := each.pop()) > 0:
        exact = f"{number:.0f}" if number == int(number) else f"{number:.1f} on average"
        return f"rollout step, {exact} optimizer steps each"
    return "rollout step"


def _section(section: Section, runs: Sequence[Run]) -> DrawnSection:
    drawn: list[Drawn] = []
    missing: list[str] = []
    numbers: list[tuple[str, list[str]]] = []
    for chart in section.charts:
        found = [[_points(run, chart, at) for at in range(len(chart.series))] for run in runs]
        if not any(run[0][0] for run in found):  # the first series is what the chart is about
            missing.append(chart.title)
            continue
        drawn += _stacks(chart, runs, found) if chart.stack else [_lines(chart, runs, found)]
        numbers += _numbers(chart, runs, found)
    return DrawnSection(
        key=section.key, title=section.title, lead=section.lead, charts=drawn, missing=missing, numbers=numbers
    )


def _points(run: Run, chart: Chart, series: int) -> Points:
    value = chart.series[series].value
    known = [(line["rollout_step"], float(y)) for line in run.lines if (y := value(line)) is not None]
    return [step for step, _ in known], [y for _, y in known]


def _lines(chart: Chart, runs: Sequence[Run], found: Sequence[Sequence[Points]]) -> Drawn:
    """One run: a colour a series. Two runs: a colour a run, a dash a series."""
    curves, legend = [], []
    for number, run in enumerate(runs):
        for at, (steps, values) in enumerate(found[number]):
            if not steps or (len(runs) == 1 and at and not any(values)):
                continue  # a series that is all zero beside another one says nothing
            own = chart.series[at].colour
            colour, dash = (number, at) if len(runs) > 1 else (at if own is None else own, 0)
            curves.append(Curve(steps=steps, values=values, colour=colour, dash=dash))
            label = chart.series[at].label if len(runs) == 1 else f"{run.name}: {chart.series[at].label}"
            legend.append(Key(label=label, colour=colour, dash=dash, latest=spoken(values[-1], chart.unit)))
    band = chart.band if all(has_paper_ranges(run) for run in runs) else None
    svg = draw_curves(curves, _frame(chart, runs, band), salt=chart.key)
    shaded = f"Shaded: what figure {chart.figure} of the paper spans for Qwen2.5-32B." if band else ""
    return Drawn(title=chart.title, note=chart.note, figure=chart.figure, band=shaded, svg=Markup(svg), legend=legend)


def _stacks(chart: Chart, runs: Sequence[Run], found: Sequence[Sequence[Points]]) -> list[Drawn]:
    """Layers of two runs cannot lie on each other: one chart a run."""
    drawn = []
    for number, run in enumerate(runs):
        steps = sorted({step for layer, _ in found[number] for step in layer})
        if not steps:
            continue
        lookups: list[Mapping[int, float]] = [dict(zip(*points, strict=True)) for points in found[number]]
        layers = [[lookup.get(step, 0.0) for step in steps] for lookup in lookups]
        svg = draw_stack(steps, layers, _frame(chart, runs, None), salt=f"{chart.key}{number}")
        legend = [
            Key(label=series.label, colour=at, dash=0, latest=spoken(layers[at][-1], chart.unit))
            for at, series in enumerate(chart.series)
            if any(layers[at])
        ]
        title = chart.title if len(runs) == 1 else f"{chart.title}: {run.name}"
        drawn.append(Drawn(title=title, note=chart.note, figure="", band="", svg=Markup(svg), legend=legend))
    return drawn


def _frame(chart: Chart, runs: Sequence[Run], band: tuple[float, float] | None) -> Frame:
    last = max(run.steps for run in runs)
    return Frame(
        unit=chart.unit,
        x_label=step_label(runs),
        last=last,
        from_zero=chart.from_zero,
        to_one=chart.to_one,
        band=band,
    )


def _numbers(chart: Chart, runs: Sequence[Run], found: Sequence[Sequence[Points]]) -> list[tuple[str, list[str]]]:
    rows = []
    for number, run in enumerate(runs):
        for at, (steps, values) in enumerate(found[number]):
            if steps:
                name = f"{chart.title}, {chart.series[at].label}" + (f" ({run.name})" if len(runs) > 1 else "")
                shown = (values[0], min(values), max(values), values[-1])
                rows.append((name, [spoken(value, chart.unit) for value in shown]))
    return rows


def total(run: Run, name: str) -> float:
    """Sum of a metric over the run; 0 where it was never measured."""
    return sum(line.get(name) or 0 for line in run.lines)


def share(value: float) -> str:
    """12.5%"""
    return spoken(value, Unit.SHARE)


def count(value: Any) -> str:
    """12 345"""
    return spoken(float(value), Unit.COUNT)
