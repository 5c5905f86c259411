"""Which alarms a run had, from which rollout step to which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dapo.monitor.health import Alarm, HealthLimits, check_health


@dataclass(frozen=True, kw_only=True)
class Spell:
    """An alarm that held without a break from rollout step `first` to `last`."""

    alarm: Alarm
    """As it stood at `last`."""
    first: int
    last: int
    holds: bool
    """Whether it still holds at the newest step."""


def limits_of(setting: Any) -> HealthLimits:
    """Thresholds of a run: those that its config sets, else the defaults.

    Args:
        setting: config key -> value or None.
    """
    warn, stop = setting("monitor.mismatch_warn"), setting("monitor.mismatch_stop")
    limits = HealthLimits()
    return replace(
        limits,
        mismatch_warn=warn if isinstance(warn, int | float) else limits.mismatch_warn,
        mismatch_stop=stop if isinstance(stop, int | float) else limits.mismatch_stop,
    )


def alarm_spells(lines: Sequence[Mapping[str, Any]], limits: HealthLimits) -> list[Spell]:
    """All spells, those that hold now first, then the newest first."""
    open_spells: dict[str, Spell] = {}
    closed: list[Spell] = []
    for done in range(1, len(lines) + 1):
        step = lines[done - 1]["rollout_step"]
        now = {alarm.name: alarm for alarm in check_health(lines[:done], limits)}
        closed += [open_spells.pop(name) for name in list(open_spells) if name not in now]
        for name, alarm in now.items():
            first = open_spells[name].first if name in open_spells else step
            open_spells[name] = Spell(alarm=alarm, first=first, last=step, holds=done == len(lines))
    return [*open_spells.values(), *sorted(closed, key=lambda spell: -spell.last)]
