"""The throughput report as Markdown, JSON and one HTML page that needs no network."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_dapo.report.page import page_environment
from tools.throughput import Profile
from tools.timeline_figures import rank_rows

TEMPLATES = Path(__file__).parent / "templates"
WORDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def markdown(profiles: Sequence[Profile]) -> str:
    """The report as a Markdown page."""
    lines = ["# Throughput", "", *(f"- {line}" for line in _descriptions(profiles)), ""]
    lines += _table(_heads(profiles), _cells(profiles))
    for profile in profiles:
        if profile.recorded:
            lines += ["", f"## Ranks of {profile.name}", "", *_table(WORDS["rank_heads"], _rank_cells(profile))]
    return "\n".join([*lines, "", *(f"{note}\n" for note in _notes(profiles))])


def as_json(profiles: Sequence[Profile]) -> str:
    """Every figure by name, null where it is unknown."""
    tree = [
        {
            "run": profile.name,
            "steps": profile.steps,
            "recorded_steps": [step.step for step in profile.recorded],
            "description": profile.description,
            "figures": profile.figures,
            "ranks": rank_rows(profile.recorded),
        }
        for profile in profiles
    ]
    return json.dumps(tree, indent=2) + "\n"


def page(profiles: Sequence[Profile]) -> str:
    """The same as one HTML file."""
    template = page_environment(TEMPLATES).get_template("throughput.html.j2")
    return template.render(
        names=" and ".join(profile.name for profile in profiles),
        descriptions=_descriptions(profiles),
        tiles=[(label, [_tile(profile, units, form) for profile in profiles]) for label, units, form in WORDS["tiles"]],
        heads=_heads(profiles),
        rows=[row for row in _cells(profiles) if any(cell != "–" for cell in row[1:])],
        ranks=[(profile.name, _rank_cells(profile)) for profile in profiles if profile.recorded],
        rank_heads=WORDS["rank_heads"],
        notes=_notes(profiles),
    )


def _tile(profile: Profile, units: dict[str, str], form: str) -> tuple[str, str]:
    """(value, unit)"""
    shown = ((_shown(profile.figures[key], form), unit) for key, unit in units.items())
    return next((each for each in shown if each[0] != "–"), ("–", ""))


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return lines + [f"| {' | '.join(cells)} |" for cells in body]


def _notes(profiles: Sequence[Profile]) -> list[str]:
    recorded = [bool(profile.recorded) for profile in profiles]
    shown = {"formula": True, "timeline": any(recorded), "not_recorded": not all(recorded)}
    return [WORDS[name] for name, true in shown.items() if true]


def _heads(profiles: Sequence[Profile]) -> list[str]:
    return ["figure", *(profile.name for profile in profiles), *(["second / first"] if len(profiles) == 2 else [])]


def _cells(profiles: Sequence[Profile]) -> list[list[str]]:
    table = []
    for key, label, form in WORDS["rows"]:
        values = [profile.figures[key] for profile in profiles]
        row = [label, *(_shown(value, form) for value in values)]
        if len(values) == 2:
            first, second = values
            row.append(_shown(second / first if first and second is not None else None, ".2f"))
        table.append(row)
    return table


def _rank_cells(profile: Profile) -> list[list[str]]:
    table = []
    for row in rank_rows(profile.recorded):
        place = row["place"]
        call = max(row["peak"], key=row["peak"].get, default="–")
        table.append(
            [
                str(place["rank"]),
                f"TP {place['tensor']}, PP {place['pipeline']}, CP {place['context']}, DP {place['data']}",
                _shown(row["compute"] / row["update"] if row["update"] else None, ".1%"),
                _shown(row["peak"][call] / 1e6 if row["peak"] else None, ",.0f"),
                call,
            ]
        )
    return table


def _descriptions(profiles: Sequence[Profile]) -> list[str]:
    return [f"{profile.name}: {profile.description}" for profile in profiles]
