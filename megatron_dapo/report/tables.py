"""What a report says in tables: computed here, laid out by the template. And what was learnt: each prompt over its
groups; how held-out accuracy follows compute (ScaleRL, arXiv 2510.13786)."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from megatron_dapo.monitor.health import Alarm, HealthMonitor
from megatron_dapo.monitor.statistics import WAYS, Z95, Estimate
from megatron_dapo.monitor.timeline import PHASES
from megatron_dapo.report.chart import value_text
from megatron_dapo.report.sections import Group, read_sections
from megatron_dapo.report.source import Run
from megatron_dapo.storage.ledger import Event, LedgerError, effective_events, read_ledger


class AlarmPeriod(NamedTuple):
    """An alarm, as it stood at rollout step `last`, that held without a break since `first`."""

    alarm: Alarm
    first: int
    last: int


def alarm_periods(run: Run) -> list[AlarmPeriod]:
    """Those that hold now first, then the newest first."""
    monitor = HealthMonitor((), **run.alarm_bounds)
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


def vital_rows(groups: Sequence[Group]) -> list[list[str]]:
    """[what, first -> last], of several groups the last of each; means over a group's runs. What no run measured is
    left out."""
    rows = []
    for chart in (chart for section in read_sections() for chart in section.charts if chart.vital):
        curves, ends = [chart.curves([group])[0] for group in groups], (-1,) if len(groups) > 1 else (0, -1)
        if any(curves):
            cells = (" → ".join(value_text(c[0].values[end], chart.unit) for end in ends) if c else "–" for c in curves)
            rows.append([chart.title, *cells])
    return rows


def time_parts(group: Group) -> dict[str, float]:
    """Seconds by what they went into: of a finished run all of them, of another one those of its rollout steps."""
    parts = {phase.replace("_", " "): sum(run.total(f"timing/{phase}") for run in group.runs) for phase in PHASES}
    spent: list[dict[str, float]] = [run.summary.get("seconds") or {} for run in group.runs]
    parts["evaluation"] += sum(each.get(f"evaluation_{when}", 0.0) for each in spent for when in ("before", "after"))
    pairs = zip(group.runs, spent, strict=True)
    whole = sum(max(run.total("timing/step"), each.get("total", 0.0)) for run, each in pairs)
    return parts | {"start and rest": max(0.0, whole - sum(parts.values()))}


def newest_samples(run: Run, *, right: bool) -> list[dict[str, Any]]:
    """The newest four responses that were right, or wrong."""
    return [line for line in run.samples if bool(line.get("accuracy")) is right][:-5:-1]


HARDEST, LAST = 10, 12
JUDGED = (Event.TRAINED, Event.FILTERED, Event.CHECKPOINT, Event.RESUMED)
"""Events that tell which groups were decided and stand."""

POINTS = 8
"""Fewer measurements after the first one do not tell three parameters."""

FORECAST_WIDTH = 0.05
"""Half of the widest interval that is still called a forecast."""


def groups_by_prompt(run: Run) -> dict[int, list[int]]:
    """Prompt -> right responses in each of its groups that was decided, oldest first, by the ledger's events that
    stand."""
    path = run.path / "ledger.jsonl"
    try:
        events = effective_events(read_ledger(path, JUDGED)) if path.exists() else []
    except (LedgerError, KeyError, TypeError, OSError) as error:
        run.notes.append(f"{path.name} cannot be read: {error}")
        return {}
    groups: dict[int, list[int]] = {}
    for event in events:
        row, right = event.get("row"), event.get("correct")
        if event.get("event") in (Event.TRAINED, Event.FILTERED) and isinstance(row, int) and isinstance(right, int):
            groups.setdefault(row, []).append(right)
    return groups


def prompt_kinds(groups: Mapping[int, Sequence[int]]) -> dict[str, int]:
    """How many prompts are of each kind, by the right responses in each of their groups.

    Example: 0, 4 is newly solved; 4, 0 is forgotten; 0, 0 is never solved.
    """
    every, again = groups.values(), [right for right in groups.values() if len(right) > 1]
    return {
        "asked": len(every),
        "never solved": sum(not any(right) for right in every),
        "asked again": len(again),
        "newly solved: none right at first, some at last": sum(not right[0] and right[-1] > 0 for right in again),
        "forgotten: some right before, none at last": sum(any(right[:-1]) and not right[-1] for right in again),
    }


def hardest(groups: Mapping[int, Sequence[int]], run: Run) -> list[list[str]]:
    """[prompt, right responses in its last groups] of the prompts with the fewest over all groups, those asked most
    often first. A prompt is named by its place in its file, where a kept sample tells it."""
    places = {line["row"]: line.get("place") for line in run.samples if isinstance(line.get("row"), int)}
    rows = sorted(groups, key=lambda row: (np.mean(groups[row]), -len(groups[row]), row))[:HARDEST]
    named = {row: str(places.get(row) or f"prompt {row} of the set") for row in rows}
    return [[name, ", ".join(map(str, groups[row][-LAST:]))] for row, name in named.items()]


def fit_scaling(hours: np.ndarray, accuracy: np.ndarray, start: float) -> dict[str, Estimate] | str:
    """R(C) = R_0 + (A - R_0) / (1 + (C_mid / C)^B), by least squares: A, B, C_mid, and the accuracy at 2, 4, 8 and 16
    times the hours as far as it is forecast. 95% intervals by the profile likelihood. A text says why there is none.

    Args:
        hours: [n] C of each measurement, above 0, increasing.
        accuracy: [n] R, in [0, 1].
        start: R_0, measured before training.
    """
    freedom = len(hours) - 3
    if len(hours) < POINTS:
        return f"{len(hours)} measurements of held-out accuracy after the first of {POINTS} needed (evaluation.every)"
    student = Z95 + (Z95**3 + Z95) / (4 * freedom) + (5 * Z95**5 + 16 * Z95**3 + 3 * Z95) / (96 * freedom**2)
    gain, ends = accuracy - start, [(0.005, max(1 - start, 0.01)), (hours[0] / 4, 30 * hours[-1]), (0.25, 8.0)]
    total = middle = exponent = errors = likely = np.zeros(0)
    for _ in range(2):  # all there is, then closely where the errors are small
        total, middle, exponent = np.meshgrid(*(np.geomspace(*end, 100) for end in ends), indexing="ij")
        shapes = 1 / (1 + (middle[0, :, :, None] / hours) ** exponent[0, :, :, None])
        errors = total**2 * (shapes**2).sum(-1) - 2 * total * (shapes @ gain) + (gain**2).sum()
        # A perfect fit leaves rounding.
        likely = errors <= max(errors.min(), 1e-12) * (1 + student**2 / freedom)
        if likely[-1].any() or middle[likely].max() > hours[-1]:
            return f"accuracy over {hours[-1]:.3g} h does not show yet where it will end"
        ends = [(each[likely].min() / 1.15, each[likely].max() * 1.15) for each in (total, middle, exponent)]
    best = errors.argmin()

    def estimate(values: np.ndarray) -> Estimate:
        kept = values[likely]
        return Estimate(value=values.flat[best].item(), low=kept.min().item(), high=kept.max().item())

    values = {"A": estimate(start + total), "B": estimate(exponent), "C_mid": estimate(middle)}
    for times in (2, 4, 8, 16):
        later = estimate(start + total / (1 + (middle / (times * hours[-1])) ** exponent))
        if later.high - later.low > 2 * FORECAST_WIDTH:
            break
        values[f"at {times} x the hours"] = later
    return values


def scaling(run: Run) -> tuple[str, dict[str, Estimate]] | str:
    """What was measured, and `fit_scaling` of it over the hours of rollout steps without their evaluations."""
    way = next((way for way in WAYS if "before" in run.held_out.get(way, {})), None)
    if way is None:
        return "accuracy before training was not measured"
    hours = accumulate((line.get("timing/step") or 0) - (line.get("timing/evaluation") or 0) for line in run.lines)
    points = [(at / 3600, line.get(f"evaluation/{way}")) for at, line in zip(hours, run.lines, strict=True)]
    measured = np.array([point for point in points if point[0] > 0 and point[1] is not None]).reshape(-1, 2)
    before = run.held_out[way]["before"]
    fit = fit_scaling(measured[:, 0], measured[:, 1], before.accuracy)
    start = Estimate(value=before.accuracy, low=before.low, high=before.high)
    about = f"{way.capitalize()} answers, {len(measured)} measurements in {measured[:, 0].max(initial=0):.3g} hours"
    return fit if isinstance(fit, str) else (about, {"R_0": start, **fit})
