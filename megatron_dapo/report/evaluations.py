"""Held-out figures of every evaluation of a run: those inside it, and those of `megatron-dapo eval` beside it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.monitor.statistics import EVALUATIONS, Estimate

INSIDE, BESIDE = "inside the run", "beside it"
SAMPLED = "sampled"
_STEPS = re.compile(r"(?:step|v)(\d+)")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One way of answering in one folder of `evaluations/`. Evaluation(name="v12", step=12, where=BESIDE,
    way="sampled", problems=30, samples=8, figures={"avg@8": Estimate(...)})"""

    name: str
    step: int | None
    """Rollout steps that the weights had behind them; None where the name does not say it."""
    where: str
    way: str
    problems: int
    samples: int
    figures: Mapping[str, Estimate]
    """avg@n, and with several answers a problem pass@n and cons@n."""


def read_evaluations(run: Path, last_step: int, notes: list[str]) -> list[Evaluation]:
    """In the order of their steps. One that cannot be read is left out, with a line in `notes`."""
    found: list[Evaluation] = []
    for file in (run / EVALUATIONS).glob("*/result.json"):
        name = file.parent.name
        try:
            found += [*_ways(name, last_step, json.loads(file.read_text(encoding="utf-8"))["ways"])]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"{EVALUATIONS}/{name}/{file.name} cannot be read ({type(error).__name__}: {error}).")
    return sorted(found, key=lambda each: (each.step is None, each.step or 0, each.name))


def _ways(name: str, last_step: int, ways: Mapping[str, Any]) -> Iterator[Evaluation]:
    numbered = _STEPS.fullmatch(name)
    step = int(numbered[1]) if numbered else {"before": 0, "after": last_step}.get(name)
    where = INSIDE if name.startswith("step") or name in ("before", "baseline", "after") else BESIDE
    for way, about in ways.items():
        problems, samples = about["problems"], about["samples"]
        names = [f"{figure}@{samples}" for figure in ("avg", *(("pass", "cons") if samples > 1 else ()))]
        ends = {each: {end: float(about["figures"][each][end]) for end in ("value", "low", "high")} for each in names}
        figures = {each: Estimate(**interval) for each, interval in ends.items()}
        yield Evaluation(
            name=name, step=step, where=where, way=way, problems=problems, samples=samples, figures=figures
        )


def over_steps(evaluations: Sequence[Evaluation], where: str) -> dict[str, list[tuple[int, float, float, float]]]:
    """Label -> (rollout step, value, low, high), of the evaluations `where` whose step is known: sampled answers, where
    there are any, else greedy ones."""
    sampled = {each.name for each in evaluations if each.way == SAMPLED}
    series: dict[str, list[tuple[int, float, float, float]]] = {}
    for each in evaluations:
        if each.where == where and each.step is not None and (each.way == SAMPLED or each.name not in sampled):
            for name, found in each.figures.items():
                series.setdefault(f"{name}, {each.way}", []).append((each.step, found.value, found.low, found.high))
    return series
