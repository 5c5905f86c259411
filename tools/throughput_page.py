"""The throughput report as Markdown, JSON and one HTML page that needs no network."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.monitor.timeline import PHASES
from megatron_dapo.report.page import page_environment
from tools.throughput import Profile, Row, rows
from tools.timeline_figures import rank_rows

TEMPLATES = Path(__file__).parent / "templates"
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
    "responses run; memory = the most of any rank in any call. `--trace FILE` writes a recorded step for "
    "ui.perfetto.dev."
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
    """The same as one HTML file."""
    cells = [_cells(row, profiles) for row in rows(PHASES)]
    template = page_environment(TEMPLATES).get_template("throughput.html.j2")
    return template.render(
        names=" and ".join(profile.name for profile in profiles),
        descriptions=_descriptions(profiles),
        tiles=_tiles(profiles),
        heads=_heads(profiles),
        rows=[row for row in cells if any(cell != "–" for cell in row[1:])],
        ranks=[(profile.name, _rank_cells(profile)) for profile in profiles if profile.recorded],
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
