"""results.json of `run_stages` as a page for a person, and as the table that a command prints last."""

from typing import Any

COUNTED = ("passed", "failed", "skipped")


def table(results: dict[str, Any]) -> str:
    """One line for each stage, in columns."""
    rows = [("stage", "outcome", "seconds", "planned", "passed", "failed", "skipped", "why")]
    rows += [_row(name, stage) for name, stage in results["stages"].items()]
    widths = [max(len(row[at]) for row in rows) for at in range(7)]
    lines = ["  ".join([*(row[at].ljust(widths[at]) for at in range(7)), row[7][:90]]).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def page(results: dict[str, Any]) -> str:
    """Markdown: machine, commands, stages, figures, and every test that failed or was skipped."""
    stages = results["stages"]
    machine = stages.get("environment", {}).get("figures", {})
    seconds = sum(stage["seconds"] for stage in stages.values())
    lines = [f"# Measured on {machine.get('GPU', 'an unknown GPU' if results['device'] == 'cuda' else 'a CPU')}", ""]
    if results["device"] == "cpu":
        lines += ["**No GPU took part: small sizes on a CPU, which check the tests and not the GPU path.**", ""]
    lines += ["Written by `make test-gpu` (`tests/gpu/runner/run_stages.py`). Commands:", "", "```"]
    lines += [f"{c['at']}  {c['line']}  ({c.get('seconds', '?')} s)" for c in results["commands"]]
    lines += ["```", "", f"The stages took {seconds:.0f} s.", ""]
    lines += [
        "| stage | shows | outcome | seconds | planned | passed | failed | skipped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, stage in stages.items():
        row = _row(name, stage)
        lines.append(f"| {name} | {stage['shows']} | {' | '.join(row[1:7])} |")
    for name, stage in stages.items():
        figures = [pair for key, value in stage.get("figures", {}).items() for pair in _flat(key, value)]
        odd = [(test, found) for test, found in stage["tests"].items() if found["outcome"] != "passed"]
        if not (figures or odd or stage["reason"]):
            continue
        lines += ["", f"## {name}", ""]
        if stage["reason"]:
            lines += [f"{stage['outcome']}: {_cell(stage['reason'])}", ""]
        if figures:
            lines += [
                "| figure | value |",
                "|---|---|",
                *(f"| {_cell(key)} | {_cell(value)} |" for key, value in figures),
            ]
        lines += [f"- `{test}` {found['outcome']}: {_cell(found['reason'])}" for test, found in odd]
    return "\n".join(lines) + "\n"


def _row(name: str, stage: dict[str, Any]) -> tuple[str, ...]:
    counts = [sum(test["outcome"] == outcome for test in stage["tests"].values()) for outcome in COUNTED]
    seconds = (f"{stage['seconds']:.0f}", str(stage["planned_s"]))
    return (name, stage["outcome"], *seconds, *map(str, counts), stage["reason"].replace("\n", " "))


def _flat(key: str, value: Any) -> list[tuple[str, str]]:
    """A dict of numbers is one line, a dict of dicts a line for each."""
    if not isinstance(value, dict):
        return [(key, _number(value))]
    plain = {inner: part for inner, part in value.items() if not isinstance(part, dict)}
    nested = [
        pair for inner, part in value.items() if isinstance(part, dict) for pair in _flat(f"{key}: {inner}", part)
    ]
    return ([(key, "; ".join(f"{inner} {_number(part)}" for inner, part in plain.items()))] if plain else []) + nested


def _number(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_number, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
