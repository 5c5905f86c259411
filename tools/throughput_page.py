"""The throughput report as Markdown, JSON and one HTML page that needs no network."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.report.page import page_environment
from tools.throughput import ROWS, Profile
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
    "passes over their mean, less 1; rollout tail = share of the rollout in which fewer than --tail-share of the most "
    "responses run; memory = the most of any rank in any call. `--trace FILE` writes a recorded step for "
    "ui.perfetto.dev."
)
NOT_RECORDED = (
    "Without a timeline (monitor.timeline_every), bubble, communication, imbalance, rollout tail and memory are not "
    "known."
)
TILES = (
    ("Rollout step", {"step_s": " s"}, ",.1f"),
    ("Rollout", {"generated_per_s_gpu": " tokens/s/GPU", "generated_per_s": " tokens/s"}, ",.0f"),
    ("Training", {"trained_per_s_gpu": " tokens/s/GPU", "trained_per_s": " tokens/s"}, ",.0f"),
    ("MFU of the update", {"mfu": ""}, ".1%"),
    ("Pipeline bubble", {"bubble": ""}, ".1%"),
    ("Communication", {"communication": " of the update"}, ".1%"),
)
"""Label, figures with their units, the first known of which is shown, form."""
RANK_HEADS = ["rank", "place", "passes, share of its update", "most memory, MB", "in"]


def markdown(profiles: Sequence[Profile]) -> str:
    """The report as a Markdown page."""
    lines = ["# Throughput", "", *(f"- {line}" for line in _descriptions(profiles)), ""]
    lines += _table(_heads(profiles), _cells(profiles))
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
    template = page_environment(TEMPLATES).get_template("throughput.html.j2")
    return template.render(
        names=" and ".join(profile.name for profile in profiles),
        descriptions=_descriptions(profiles),
        tiles=[(label, [_tile(profile, units, form) for profile in profiles]) for label, units, form in TILES],
        heads=_heads(profiles),
        rows=[row for row in _cells(profiles) if any(cell != "–" for cell in row[1:])],
        ranks=[(profile.name, _rank_cells(profile)) for profile in profiles if profile.recorded],
        rank_heads=RANK_HEADS,
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
    return [FORMULA, *([TIMELINE] if any(recorded) else []), *([] if all(recorded) else [NOT_RECORDED])]


def _heads(profiles: Sequence[Profile]) -> list[str]:
    return ["figure", *(profile.name for profile in profiles), *(["second / first"] if len(profiles) == 2 else [])]


def _cells(profiles: Sequence[Profile]) -> list[list[str]]:
    table = []
    for key, label, form in ROWS:
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
