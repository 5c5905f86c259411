"""What a report says in tables: computed here, laid out by the template."""

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatron_dapo.monitor.console import duration
from megatron_dapo.monitor.health import Alarm, HealthMonitor
from megatron_dapo.monitor.statistics import WAYS, difference
from megatron_dapo.monitor.timeline import PHASES
from megatron_dapo.monitor.writer import series
from megatron_dapo.report.chart import Unit, value_text
from megatron_dapo.report.overlay import Group
from megatron_dapo.report.source import Run

share, count = partial(value_text, unit=Unit.SHARE), partial(value_text, unit=Unit.COUNT)
"""12.5% and 12 345"""


VITALS = {
    "accuracy/mean": ("Right in training", Unit.SHARE),
    "entropy": ("Entropy, nats", Unit.NUMBER),
    "response_length/mean": ("Response, tokens", Unit.COUNT),
    "truncated_fraction": ("Cut off", Unit.SHARE),
    "sampling/pass_rate": ("Useful groups", Unit.SHARE),
    "grad_norm": ("Gradient norm", Unit.NUMBER),
    "mismatch/mean_abs": ("Server − trainer", Unit.NUMBER),
}
"""What the first screen says of a run's health."""


class AlarmPeriod(NamedTuple):
    """An alarm, as it stood at rollout step `last`, that held without a break since `first`."""

    alarm: Alarm
    first: int
    last: int


def alarm_periods(run: Run) -> list[AlarmPeriod]:
    """Those that hold now first, then the newest first."""
    monitor = HealthMonitor(**run.alarm_bounds)
    periods: dict[str, AlarmPeriod] = {}
    over: list[AlarmPeriod] = []
    for line in run.lines:
        monitor.add(line)
        now = {alarm.name: alarm for alarm in monitor.alarms}
        over += [periods.pop(name) for name in list(periods) if name not in now]
        for name, alarm in now.items():
            first = periods[name].first if name in periods else line["rollout_step"]
            periods[name] = AlarmPeriod(alarm, first, last=line["rollout_step"])
    return [*periods.values(), *sorted(over, key=lambda period: -period.last)]


def bias_rows(run: Run) -> list[list[str]]:
    """[what, trained on, generated, ratio] over the whole run, weighted by the groups of each step."""
    rows = []
    for what, worded in (("length", count), ("accuracy", share)):
        accepted = _weighted(run, f"bias/accepted_{what}", "sampling/kept")
        generated = _weighted(run, f"bias/generated_{what}", "sampling/generated")
        if accepted is not None and generated:
            rows.append([f"mean {what}", worded(accepted), worded(generated), f"{accepted / generated:.3f}"])
    return rows


def reflection_rows(run: Run) -> list[list[str]]:
    """[words, share of responses, accuracy of those, correlation with success inside a step]; the first two over all
    responses of the run, each step counting by the groups that it generated."""
    rows = []
    for name in ("reflection", "backtracking"):
        rate = _weighted(run, f"{name}_rate", "sampling/generated")
        if rate is None:
            continue
        keys = (f"{name}_rate", f"{name}_accuracy", "accuracy/mean", "sampling/generated")
        steps = [[line.get(key) for key in keys] for line in run.lines]
        measured = [step for step in steps if None not in (step[0], step[2]) and (not step[0] or step[1] is not None)]
        right, phi = "not measured", "not measured"
        if measured:
            rates, among, accuracies, groups = np.nan_to_num(np.array(measured, dtype=float).T)
            hits, found = rates * groups, correlation(rates, among, accuracies)
            right = share((among * hits).sum() / hits.sum()) if hits.any() else "never seen"
            phi = "–" if found is None else f"{found:+.2f}"
        rows.append([name, share(rate), right, phi])
    return rows


def correlation(rates: ArrayLike, among: ArrayLike, accuracies: ArrayLike) -> float | None:
    """Correlation of "has the word" with "is right" inside rollout steps, over all steps.

    Each step's 2 x 2 table follows from three shares, so nothing but the metrics is needed. Covariances and variances
    are averaged over steps, not the responses pooled: that both rise in the course of training counts for nothing.

    Args:
        rates: [S] share of responses with the word.
        among: [S] share of right ones among those.
        accuracies: [S] share of right ones among all.

    Returns:
        phi in [-1, 1]; None where one of the two never varies.
    """
    has, right_if, right = (np.asarray(values, dtype=float) for values in (rates, among, accuracies))
    covariance = has * right_if - has * right
    spread = math.sqrt(float((has * (1 - has)).sum()) * float((right * (1 - right)).sum()))
    return float(covariance.sum()) / spread if spread > 1e-12 else None


def phase_rows(run: Run) -> list[list[str]]:
    """[phase, seconds in all, share, mean of a step]; the last row is what no phase claims."""
    whole = run.total("timing/step")
    spent = {phase.replace("_", " "): run.total(f"timing/{phase}") for phase in PHASES}
    spent["coordinator"] = max(0.0, whole - sum(spent.values()))
    return [
        [phase, duration(seconds), share(seconds / whole), duration(seconds / len(run.lines))]
        for phase, seconds in spent.items()
        if seconds and whole
    ]


def vital_rows(groups: Sequence[Group]) -> list[list[str]]:
    """[what, first -> last], of several groups the last of each; means over a group's runs. What no run measured is
    left out."""
    rows = []
    for metric, (label, unit) in VITALS.items():
        known = [[values for run in group.runs if (values := series(run.lines, metric)[1])] for group in groups]
        ends = [
            [fmean(values[at] for values in each) for at in ((0, -1) if len(groups) == 1 else (-1,))] if each else []
            for each in known
        ]
        if any(ends):
            rows.append([label, *(" → ".join(value_text(value, unit) for value in each) or "–" for each in ends)])
    return rows


def held_out_change(group: Group) -> tuple[str, str]:
    """Accuracy before -> after and the gain with its interval, or over several seeds its range, as texts."""
    for way in WAYS:
        known = [run.held_out[way] for run in group.runs if "before" in run.held_out.get(way, {})]
        done = [(stages["before"], stages["after"]) for stages in known if "after" in stages]
        if not done and known:
            return share(fmean(stages["before"].accuracy for stages in known)), f"{way}, so far only before"
        if done:
            gains = [difference(*ends) for ends in done]
            low, high = gains[0].low, gains[0].high
            if len(gains) > 1:
                low, high = min(gain.value for gain in gains), max(gain.value for gain in gains)
            mean, seeds = fmean(gain.value for gain in gains), f"; {len(gains)} seeds" if len(gains) > 1 else ""
            ends = [share(fmean(each.accuracy for each in stage)) for stage in zip(*done, strict=True)]
            return " → ".join(ends), f"{way}; {100 * mean:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]{seeds}"
    return "–", "not measured yet"


def time_parts(group: Group) -> dict[str, float]:
    """Seconds by what they went into: of a finished run all of them, of another one those of its rollout steps."""
    parts = {phase.replace("_", " "): sum(run.total(f"timing/{phase}") for run in group.runs) for phase in PHASES}
    spent: list[dict[str, float]] = [run.summary.get("seconds") or {} for run in group.runs]
    parts["evaluation"] += sum(each.get(f"evaluation_{when}", 0.0) for each in spent for when in ("before", "after"))
    whole = sum(
        max(run.total("timing/step"), each.get("total", 0.0)) for run, each in zip(group.runs, spent, strict=True)
    )
    return parts | {"start and rest": max(0.0, whole - sum(parts.values()))}


def newest_samples(run: Run, *, right: bool) -> list[dict[str, Any]]:
    """The newest four responses that were right, or wrong."""
    return [line for line in run.samples if bool(line.get("accuracy")) is right][:-5:-1]


def _weighted(run: Run, name: str, weight: str) -> float | None:
    known = [(line[name], line[weight]) for line in run.lines if line.get(name) is not None and line.get(weight)]
    groups = sum(number for _, number in known)
    return sum(value * number for value, number in known) / groups if groups else None
