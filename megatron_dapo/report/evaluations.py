"""Held-out figures of every evaluation of a run: those inside it, and those of `megatron-dapo eval` beside it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.monitor.statistics import EVALUATIONS, Estimate

INSIDE, BESIDE = "inside the run", "beside it"
_STEPS = re.compile(r"(?:step|v)(\d+)")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """One way of answering the held-out problems. Answers(problems=30, samples=8, figures={"avg@8": Estimate(...)})"""

    problems: int
    samples: int
    figures: Mapping[str, Estimate]
    """avg@n, and with several answers a problem pass@n and cons@n."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One folder of `evaluations/`. Evaluation(name="v12", step=12, where=BESIDE, answers={"sampled": Answers(...)})"""

    name: str
    step: int | None
    """Rollout steps that the weights had behind them; None where the name does not say it."""
    where: str
    answers: Mapping[str, Answers]

    @property
    def best_known(self) -> tuple[str, Answers] | None:
        """Sampled answers, where there are any, else greedy ones."""
        if "sampled" in self.answers:
            return "sampled", self.answers["sampled"]
        return next(iter(self.answers.items()), None)


def read_evaluations(run: Path, last_step: int, notes: list[str]) -> list[Evaluation]:
    """In the order of their steps. One that cannot be read is left out, with a line in `notes`."""
    found = []
    for file in sorted((run / EVALUATIONS).glob("*/result.json")):
        name = file.parent.name
        try:
            ways = json.loads(file.read_text(encoding="utf-8"))["ways"]
            answers = {way: _answers(about) for way, about in ways.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"{EVALUATIONS}/{name}/{file.name} cannot be read ({type(error).__name__}: {error}).")
            continue
        numbered = _STEPS.fullmatch(name)
        step = int(numbered[1]) if numbered else {"before": 0, "after": last_step}.get(name)
        inside = name.startswith("step") or name in ("before", "baseline", "after")
        found.append(Evaluation(name=name, step=step, where=INSIDE if inside else BESIDE, answers=answers))
    return sorted(found, key=lambda each: (each.step is None, each.step or 0, each.name))


def over_steps(evaluations: Sequence[Evaluation], where: str) -> dict[str, list[tuple[int, Estimate]]]:
    """Label -> (rollout step, estimate), of the evaluations `where` whose step is known."""
    series: dict[str, list[tuple[int, Estimate]]] = {}
    for each in evaluations:
        if each.where == where and each.step is not None and each.best_known:
            way, answers = each.best_known
            for name, estimate in answers.figures.items():
                series.setdefault(f"{name}, {way}", []).append((each.step, estimate))
    return series


def _answers(about: Mapping[str, Any]) -> Answers:
    samples = about["samples"]
    names = [f"{figure}@{samples}" for figure in ("avg", *(("pass", "cons") if samples > 1 else ()))]
    figures = {name: {end: float(about["figures"][name][end]) for end in ("value", "low", "high")} for name in names}
    return Answers(
        problems=about["problems"],
        samples=samples,
        figures={name: Estimate(**estimate) for name, estimate in figures.items()},
    )
