"""Held-out figures of every evaluation of a run: those inside it, and those of `megatron-dapo eval` beside it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megatron_dapo.monitor.at_k import EVALUATIONS
from megatron_dapo.report.chart import Curve, Frame, Unit, draw_curves, spoken

INSIDE, BESIDE = "inside the run", "beside it"
_STEPS = re.compile(r"(?:step|v)(\d+)")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One folder of `evaluations/`. Evaluation(name="v12", step=12, where=BESIDE, ways={"sampled": {...}})"""

    name: str
    step: int | None
    """Rollout steps that the weights had behind them; None where the name does not say it."""
    where: str
    ways: Mapping[str, Mapping[str, Any]]
    """As `result.json` holds them."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """One way of answering in one evaluation, as text."""

    name: str
    where: str
    way: str
    problems: str
    figures: list[str]


def read_evaluations(run: Path, last_step: int, notes: list[str]) -> list[Evaluation]:
    """In the order of their steps. One that cannot be read is left out, with a line in `notes`."""
    found = []
    for file in sorted((run / EVALUATIONS).glob("*/result.json")):
        name = file.parent.name
        try:
            ways = json.loads(file.read_text(encoding="utf-8"))["ways"]
            for way in ways.values():
                _estimates(way)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"{EVALUATIONS}/{name}/{file.name} cannot be read ({type(error).__name__}: {error}).")
            continue
        numbered = _STEPS.fullmatch(name)
        step = int(numbered[1]) if numbered else {"before": 0, "after": last_step}.get(name)
        inside = name.startswith("step") or name in ("before", "baseline", "after")
        found.append(Evaluation(name=name, step=step, where=INSIDE if inside else BESIDE, ways=ways))
    return sorted(found, key=lambda each: (each.step is None, each.step or 0, each.name))


def draw_evaluations(evaluations: Sequence[Evaluation], *, last_step: int, salt: str) -> list[tuple[str, Markup, list]]:
    """(title, SVG, [(label, colour, latest)]) for inside and beside, where there are two steps or more."""
    drawn = []
    for where in (BESIDE, INSIDE):
        series = _series([each for each in evaluations if each.where == where and each.step is not None])
        if not any(len(points) > 1 for points in series.values()):
            continue
        curves, legend = [], []
        for colour, (label, points) in enumerate(series.items()):
            values = [each["value"] for _, each in points]
            curves.append(
                Curve(
                    steps=[step for step, _ in points],
                    values=values,
                    colour=colour,
                    low=[each["low"] for _, each in points],
                    high=[each["high"] for _, each in points],
                )
            )
            legend.append((label, colour, spoken(values[-1], Unit.SHARE)))
        frame = Frame(unit=Unit.SHARE, x_label="rollout step", last=last_step, first=0, to_one=True)
        drawn.append((where, Markup(draw_curves(curves, frame, salt=f"{salt}{where[:2]}")), legend))
    return drawn


def evaluation_rows(evaluations: Sequence[Evaluation]) -> list[EvaluationRow]:
    """All of them, for a table."""
    return [
        EvaluationRow(
            name=each.name,
            where=each.where,
            way=way,
            problems=f"{about['problems']} x {about['samples']}",
            figures=[
                f"{name} {100 * figure['value']:.1f}% [{100 * figure['low']:.1f}, {100 * figure['high']:.1f}]"
                for name, figure in _estimates(about).items()
            ],
        )
        for each in evaluations
        for way, about in each.ways.items()
    ]


def _series(evaluations: Sequence[Evaluation]) -> dict[str, list[tuple[int, Mapping[str, float]]]]:
    """Label -> (step, estimate) of sampled answers, where there are any, else of greedy ones."""
    series: dict[str, list[tuple[int, Mapping[str, float]]]] = {}
    for each in evaluations:
        way = "sampled" if "sampled" in each.ways else next(iter(each.ways), None)
        for name, estimate in _estimates(each.ways[way]).items() if way else ():
            series.setdefault(f"{name}, {way}", []).append((each.step or 0, estimate))
    return series


def _estimates(about: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """avg@n, and with several answers a problem pass@n and cons@n."""
    samples = about["samples"]
    names = [f"{figure}@{samples}" for figure in ("avg", *(("pass", "cons") if samples > 1 else ()))]
    return {name: {part: float(about["figures"][name][part]) for part in ("value", "low", "high")} for name in names}
