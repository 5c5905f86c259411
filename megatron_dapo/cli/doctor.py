"""`megatron-dapo doctor`: can this machine run that config; one line a check, with the fix."""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.data.hub import with_local_paths
from megatron_dapo.doctor.config_checks import dry_run
from megatron_dapo.doctor.examine import examine, findings_of
from megatron_dapo.doctor.probing import Facts, Finding, Status, failed

_STYLES = {Status.PASS: "green", Status.WARNING: "yellow", Status.FAIL: "bold red"}
_WIDEST = 200
"""Columns where the output is no terminal."""


def doctor_command(path: Path | None, overrides: Sequence[str], *, with_dry_run: bool) -> ExitCode:
    """Print every check as it is made. FAILED if one of them says fail; the dry run is made only if none does."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDEST)
    if with_dry_run and path is None:
        raise typer.BadParameter("--dry-run: give the config that is to be run")
    counts: Counter[Status] = Counter()

    def show(name: str, finding: Finding) -> None:
        counts[finding.status] += 1
        label = (f"{finding.status:<8}", _STYLES[finding.status])
        console.print(Text.assemble(label, (f"{name}: ", "bold"), finding.found))
        if finding.fix:
            console.print(Text(f"        fix: {finding.fix}"))

    config = None
    try:
        config = None if path is None else with_local_paths(load_config(path, overrides))
    except ConfigError as error:
        show("config", failed(str(error), "correct the config as the message says"))
    for name, finding in examine(Facts(config)):
        show(name, finding)
    if with_dry_run and path is not None and config is not None and not counts[Status.FAIL]:
        console.print("dry run: starting trainer and servers")
        for finding in findings_of(dry_run(path, overrides, config)):
            show("dry run", finding)
    console.print(", ".join(f"{counts[status]} {status}" for status in Status))
    return ExitCode.FAILED if counts[Status.FAIL] else ExitCode.FINISHED
