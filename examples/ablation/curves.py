"""Curves of the rungs: the mean over the seeds, and how far the seeds lie apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from examples.ablation.results import Outcome, accuracy_at, cumulative_tokens, useless_share
from examples.ablation.rungs import LADDER, OFF_ALONE, ON_ALONE, PRESETS
from megatron_dapo.monitor.writer import Line
from megatron_dapo.report.chart import Curve, Drawn, Frame, Unit, draw_curves

TOKEN_POINTS = 24
"""Points of a curve over tokens: budgets at equal distances, the same for all rungs."""

SETS = {
    "ladder": ("The ladder", tuple(rung.name for rung in LADDER)),
    "on": ("Each switched on alone", ("naive", "filter", *(rung.name for rung in ON_ALONE))),
    "off": ("Each switched off alone", ("full", "token", *(rung.name for rung in OFF_ALONE))),
    "presets": ("Presets", tuple(rung.name for rung in PRESETS)),
}
"""Rungs that share a row of charts: the baseline first."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One rung's mean over its seeds at each x, with the lowest and the highest seed."""

    rung: str
    x: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


Over = Callable[[Sequence[Outcome]], tuple[Sequence[int], np.ndarray]]
"""The runs of one rung -> x, and a row of values a run."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    key: str
    title: str
    note: str
    unit: Unit
    x_label: str
    of: Over


def _over_steps(value: Callable[[Outcome, Line], float | None]) -> Over:
    def of(runs: Sequence[Outcome]) -> tuple[Sequence[int], np.ndarray]:
        steps = min(len(run.lines) for run in runs)
        rows = [[value(run, line) for line in run.lines[:steps]] for run in runs]
        return list(range(1, steps + 1)), np.array([[np.nan if v is None else v for v in row] for row in rows], float)

    return of


def _accuracy_over_tokens(runs: Sequence[Outcome]) -> tuple[Sequence[int], np.ndarray]:
    """In thousands of tokens, up to where the thriftiest of the rung's runs ends."""
    last = min(cumulative_tokens(run.lines)[-1] for run in runs)
    budgets = [last * at / TOKEN_POINTS for at in range(1, TOKEN_POINTS + 1)]
    return [round(budget / 1000) for budget in budgets], np.array(
        [[accuracy_at(run.lines, budget) for budget in budgets] for run in runs]
    )


STEP = "rollout step"
CHARTS = (
    Chart(
        key="accuracy",
        title="Accuracy over rollout steps",
        note="Of the training rollouts, before any filter.",
        unit="share",
        x_label=STEP,
        of=_over_steps(lambda _, line: line["accuracy/mean"]),
    ),
    Chart(
        key="tokens",
        title="Accuracy over generated tokens",
        note="Mean of the last third of the tokens up to there.",
        unit="share",
        x_label="generated tokens, thousands",
        of=_accuracy_over_tokens,
    ),
    Chart(
        key="entropy",
        title="Entropy",
        note="Nats, over the batch's tokens.",
        unit="number",
        x_label=STEP,
        of=_over_steps(lambda _, line: line["entropy"]),
    ),
    Chart(
        key="length",
        title="Response length",
        note="Mean tokens.",
        unit="count",
        x_label=STEP,
        of=_over_steps(lambda _, line: line["response_length/mean"]),
    ),
    Chart(
        key="truncated",
        title="Cut off at the limit",
        note="Share of the responses.",
        unit="share",
        x_label=STEP,
        of=_over_steps(lambda _, line: line["truncated_fraction"]),
    ),
    Chart(
        key="useless",
        title="Useless groups",
        note="All right or all wrong, among those decided.",
        unit="share",
        x_label=STEP,
        of=_over_steps(lambda run, line: useless_share(run, [line])),
    ),
)


def series(chart: Chart, outcomes: Sequence[Outcome], rungs: Sequence[str]) -> list[Series]:
    """The rungs that have a run with figures."""
    found = []
    for rung in rungs:
        runs = [outcome for outcome in outcomes if outcome.rung == rung and outcome.lines and not outcome.failure]
        if runs:
            x, values = chart.of(runs)
            mean, low, high = (reduce(values, axis=0).tolist() for reduce in (np.mean, np.min, np.max))
            found.append(Series(rung=rung, x=x, mean=mean, low=low, high=high))
    return found


def draw(chart: Chart, outcomes: Sequence[Outcome], key: str) -> Drawn | None:
    """One chart of the rungs of SETS[key]; None if none of them has a run."""
    _, rungs = SETS[key]
    found = series(chart, outcomes, rungs)
    if not found:
        return None
    curves = [
        Curve(label=one.rung, steps=one.x, values=one.mean, colour=rungs.index(one.rung), low=one.low, high=one.high)
        for one in found
    ]
    last = max(one.x[-1] for one in found)
    frame = Frame(title=chart.title, note=chart.note, unit=chart.unit, x_label=chart.x_label, last=last)
    return draw_curves(curves, frame, salt=f"{key}-{chart.key}")
