"""The throughput report as Markdown, JSON and one HTML page that needs no network."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_dapo.monitor.timeline import PHASES
from tools.throughput import Profile, Row, rows
from tools.timeline_chart import KINDS, PHASE_COLOURS, draw_timeline, kind_of, left_out
from tools.timeline_figures import rank_rows

FORMULA = (
    "MFU = 3 x forward FLOPs of the trained response tokens / (seconds of update x trainer GPUs x peak FLOP/s). "
    "Forward: 2 x parameters in matrix products for each token, and 2 x layers x heads x head size x length^2 for each "
    "response's causal attention, every response taken to have the mean length. Prompts and recomputation are not "
    "counted, so it is a lower bound."
)
TIMELINE = (
    "From the timeline, over all ranks: passes = seconds of forward and backward over those of the update; pipeline "
    "bubble = share of the schedule, without the sum of gradients, in which a stage runs no pass; communication = the "
    "sum of gradients, as measured (the wait for the slowest rank is in it), and tensor parallelism, which stands "
    "inside the passes and is estimated from a measured all-reduce; imbalance = the slowest data-parallel rank's "
    "passes over their mean, less 1; rollout tail = share of the rollout in which fewer than {tail:.0%} of the most "
    "responses run; memory = the most of any rank in any call."
)
NOT_RECORDED = (
    "Without a timeline (monitor.timeline_every), bubble, communication, imbalance, rollout tail and memory are not "
    "known."
)


def markdown(profiles: Sequence[Profile]) -> str:
    """The report as a Markdown page."""
    table = [_cells(row, profiles) for row in rows(PHASES)]
    lines = ["# Throughput", "", *(f"- {line}" for line in _descriptions(profiles)), ""]
    lines += _table(_heads(profiles), table)
    for profile in profiles:
        if profile.recorded:
            lines += ["", f"## Ranks of {profile.name}", "", *_table(RANK_HEADS, _rank_cells(profile))]
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
    """The same as one HTML file, with a picture of the last recorded step of each run."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = resources.files("megatron_dapo.report") / "templates" / "report.css"
    cells = [_cells(row, profiles) for row in rows(PHASES)]
    return environment.get_template("throughput.html.j2").render(
        names=" and ".join(profile.name for profile in profiles),
        style=Markup(style.read_text(encoding="utf-8")),
        descriptions=_descriptions(profiles),
        tiles=_tiles(profiles),
        heads=_heads(profiles),
        rows=[row for row in cells if any(cell != "–" for cell in row[1:])],
        pictures=[_picture(profile, number) for number, profile in enumerate(profiles) if profile.recorded],
        rank_heads=RANK_HEADS,
        notes=_notes(profiles),
    )


TILES = (
    ("Rollout step", "step_s", ",.1f", " s"),
    ("Rollout", "generated_per_s_gpu", ",.0f", " tokens/s/GPU"),
    ("Training", "trained_per_s_gpu", ",.0f", " tokens/s/GPU"),
    ("MFU of the update", "mfu", ".1%", ""),
    ("Pipeline bubble", "bubble", ".1%", ""),
    ("Communication", "communication", ".1%", " of the update"),
)
ON_CPU = {"generated_per_s_gpu": ("generated_per_s", " tokens/s"), "trained_per_s_gpu": ("trained_per_s", " tokens/s")}
"""What stands in for a figure a GPU where there is none."""


def _tiles(profiles: Sequence[Profile]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(label, [(value, unit)] of each run)"""
    tiles = []
    for label, key, form, unit in TILES:
        values = []
        for profile in profiles:
            value, shown = profile.figures.get(key), unit
            if value is None and key in ON_CPU:
                value, shown = profile.figures.get(ON_CPU[key][0]), ON_CPU[key][1]
            values.append(("–", "") if value is None else (format(value, form), shown))
        tiles.append((label, values))
    return tiles


def _picture(profile: Profile, number: int) -> dict[str, Any]:
    step = profile.recorded[-1]
    drawn = {span.name for span in step.phases}
    phases = [(name.replace("_", " "), colour) for name, colour in PHASE_COLOURS.items() if name in drawn]
    seen = {kind_of(span.name) for rank in step.ranks for span in rank.spans}
    return {
        "name": profile.name,
        "step": step.step,
        "svg": Markup(draw_timeline(step, salt=f"timeline{number}")),
        "legend": [("phases", phases), ("ranks", [(kind, colour) for kind, colour in KINDS if kind in seen])],
        "left_out": left_out(step),
        "ranks": _rank_cells(profile),
    }


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return lines + [f"| {' | '.join(cells)} |" for cells in body]


def _notes(profiles: Sequence[Profile]) -> list[str]:
    recorded = [profile for profile in profiles if profile.recorded]
    notes = [FORMULA]
    if recorded:
        notes.append(TIMELINE.format(tail=recorded[0].tail_share))
    return notes if len(recorded) == len(profiles) else [*notes, NOT_RECORDED]


def _heads(profiles: Sequence[Profile]) -> list[str]:
    names = [profile.name for profile in profiles]
    return ["figure", *names, *(["second / first"] if len(names) == 2 else [])]


def _cells(row: Row, profiles: Sequence[Profile]) -> list[str]:
    values = [profile.figures[row.key] for profile in profiles]
    cells = ["–" if value is None else format(value, row.form) for value in values]
    if len(values) == 2:
        first, second = values
        cells.append(f"{second / first:.2f}" if first and second is not None else "–")
    return [row.label, *cells]


RANK_HEADS = ["rank", "place", "passes, share of its update", "most memory, MB", "in"]


def _rank_cells(profile: Profile) -> list[list[str]]:
    table = []
    for row in rank_rows(profile.recorded):
        place = row["place"]
        call = max(row["peak"], key=row["peak"].get, default=None)
        table.append(
            [
                str(place["rank"]),
                f"TP {place['tensor']}, PP {place['pipeline']}, CP {place['context']}, DP {place['data']}",
                f"{row['compute'] / row['update']:.1%}" if row["update"] else "–",
                f"{row['peak'][call] / 1e6:,.0f}" if call else "–",
                call or "–",
            ]
        )
    return table


def _descriptions(profiles: Sequence[Profile]) -> list[str]:
    return [f"{profile.name}: {profile.description}" for profile in profiles]
