"""Throughput of a run, or of two side by side, from what it wrote: Markdown, JSON and one HTML page.

    python -m tools.profile_throughput runs/one                        # Markdown
    python -m tools.profile_throughput runs/one runs/two --out report  # report.md, .json and .html
    python -m tools.profile_throughput --actor                         # the actor's update by itself, on this CPU

Speeds and shares are sums over rollout steps divided by sums, never means of means. The first step is left out: it
compiles kernels and begins with an empty buffer (`--skip`).
"""

import argparse
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.config.base import ConfigError
from megatron_dapo.coordinator.phases import NAMES
from megatron_dapo.monitor.report.source import ReportError, read_run
from megatron_dapo.monitor.writer import MetricsError
from megatron_dapo.plan.calibration import load_calibration
from tools.throughput import Profile, Row, profile_run, rows

FORMULA = (
    "MFU = 3 x forward FLOPs of the trained response tokens / (seconds of update x trainer GPUs x peak FLOP/s). "
    "Forward: 2 x parameters in matrix products for each token, and 2 x layers x heads x head size x length^2 for each "
    "response's causal attention, every response taken to have the mean length. Prompts and recomputation are not "
    "counted, so it is a lower bound."
)
NOT_RECORDED = (
    "Not recorded by a run, so not shown: seconds of the pipeline bubble and of communication, imbalance of "
    "data-parallel ranks, peaks of memory, and when each response ended."
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td,th{padding:.3em .6em;border-bottom:1px solid #ccc;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the report; 2 if a folder holds no run that can be measured."""
    parser = argparse.ArgumentParser(prog="python -m tools.profile_throughput", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, nargs="*", help="one run directory, or two")
    parser.add_argument("--out", type=Path, help="write OUT.md, OUT.json and OUT.html instead of printing")
    parser.add_argument("--skip", type=int, default=1, help="rollout steps at the beginning that do not count")
    parser.add_argument("--peak-flops", type=float, help="of a GPU; else the calibration's, for a run on CUDA")
    actor = parser.add_argument_group(
        "the actor's update", "measured here, without a run: against a plain Hugging Face loop, and on two ranks"
    )
    actor.add_argument("--actor", action="store_true", help="measure it and print two Markdown tables")
    actor.add_argument("--turns", type=int, default=9, help="measured updates of each loop")
    actor.add_argument("--threads", type=int, default=1, help="of each process of the first table")
    actor.add_argument("--only", default="", help="cases whose name holds this")
    actor.add_argument("--rounds", type=int, default=3, help="of one process, TP=2, PP=2 in turn; 0: not measured")
    given = parser.parse_args(arguments)
    if given.actor:
        return _print_actor(given)
    if len(given.run) not in (1, 2):
        parser.error("give one run directory, or two")
    peak = given.peak_flops or load_calibration().peak_flops
    try:
        profiles = [profile_run(read_run(path), skip=given.skip, peak_flops=peak) for path in given.run]
    except (ConfigError, MetricsError, ReportError) as error:
        print(error, file=sys.stderr)
        return 2
    pages = {".md": markdown(profiles), ".json": as_json(profiles), ".html": page(profiles)}
    if given.out is None:
        print(pages[".md"], end="")
        return 0
    for ending, text in pages.items():
        given.out.with_name(given.out.name + ending).write_text(text)
    return 0


def _print_actor(given: argparse.Namespace) -> int:
    from tools.measure_actor_speed import tables  # torch and Megatron take seconds, which a run's profile needs not

    for line in tables(turns=given.turns, threads=given.threads, only=given.only, rounds=given.rounds):
        print(line, flush=True)
    return 0


def markdown(profiles: Sequence[Profile]) -> str:
    """The report as a Markdown page."""
    table = [_cells(row, profiles) for row in rows(NAMES)]
    heads = _heads(profiles)
    lines = ["# Throughput", "", *(f"- {line}" for line in _descriptions(profiles)), ""]
    lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in table]
    return "\n".join([*lines, "", FORMULA, "", NOT_RECORDED, ""])


def page(profiles: Sequence[Profile]) -> str:
    """The same as one HTML file that needs no network."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(_cells(row, profiles), "td") for row in rows(NAMES))
    described = "".join(f"<li>{html.escape(text)}</li>" for text in _descriptions(profiles))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Throughput</title><style>{STYLE}</style><h1>Throughput</h1><ul>{described}</ul>"
        f"<table>{line(_heads(profiles), 'th')}{body}</table>"
        f"<p>{html.escape(FORMULA)}</p><p>{html.escape(NOT_RECORDED)}</p></html>\n"
    )


def as_json(profiles: Sequence[Profile]) -> str:
    """Every figure by name, null where it is unknown."""
    tree = [
        {"run": profile.name, "steps": profile.steps, "description": profile.description, "figures": profile.figures}
        for profile in profiles
    ]
    return json.dumps(tree, indent=2) + "\n"


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


def _descriptions(profiles: Sequence[Profile]) -> list[str]:
    return [f"{profile.name}: {profile.description}" for profile in profiles]


if __name__ == "__main__":
    sys.exit(main())
