"""`megatron-dapo doctor`: can this machine run that config; one line a check, with the fix."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from megatron_dapo.cli.command_line import Overrides, config_of, wide_console
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError

_STYLES = {"pass": "green", "warning": "yellow", "fail": "bold red"}


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="What is to be run here.")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Then make one tiny rollout step with it.")] = False,
) -> None:
    """Look for what would stop a run: versions, GPUs, disk, ports, tokenizer, data; each line with its fix."""
    from megatron_dapo.doctor import config_checks
    from megatron_dapo.doctor.probing import FIX, Facts, failed, warning

    console = wide_console()
    if dry_run and config is None:
        raise typer.BadParameter("--dry-run: give the config that is to be run")
    counts: Counter[str] = Counter()

    def show(name: str, status: str, found: str, fix: str) -> None:
        counts[status] += 1
        console.print(Text.assemble((f"{status:<8}", _STYLES[status]), (f"{name}: ", "bold"), found))
        if fix:
            console.print(Text(f"        fix: {fix}"))

    facts = Facts()
    try:
        facts = Facts(config_of(config, overrides or [])) if config else facts
    except ConfigError as error:
        show("config", *failed(str(error)))
    for name, finding in config_checks.examine(facts):
        show(name, *finding)
    if dry_run and facts.elsewhere:
        show("dry run", *warning(f"not made: it needs {facts.elsewhere} GPUs of other nodes", FIX["in a job"]))
    elif dry_run and config and not counts["fail"]:
        console.print("dry run: starting trainer and servers")
        for finding in config_checks.findings_of(config_checks.dry_run(config, overrides or [], facts.config)):
            show("dry run", *finding)
    console.print(", ".join(f"{counts[status]} {status}" for status in _STYLES))
    raise typer.Exit(ExitCode.FAILED if counts["fail"] else ExitCode.FINISHED)
