"""What a report says in tables: computed here, laid out by the template."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from megatron_dapo.monitor.health import Alarm, HealthMonitor
from megatron_dapo.monitor.timeline import PHASES
from megatron_dapo.report.chart import value_text
from megatron_dapo.report.sections import Group, read_sections
from megatron_dapo.report.source import Run

share, count = partial(value_text, unit="share"), partial(value_text, unit="count")
"""12.5% and 12 345"""


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
