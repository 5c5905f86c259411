"""`megatron-dapo`: the commands. Each one imports its parts when it is called, so that `--help` is immediate."""

import re
import signal
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.ask import ask
from megatron_dapo.cli.command_line import ConfigFile, Overrides, config_of
from megatron_dapo.cli.diff import diff
from megatron_dapo.cli.doctor import doctor
from megatron_dapo.cli.eval import evaluate
from megatron_dapo.cli.exit_codes import exit_code_of, named
from megatron_dapo.cli.plan import plan
from megatron_dapo.cli.slurm import slurm
from megatron_dapo.cli.status import status
from megatron_dapo.monitor.console import text_page

_HELP = "Train language models by DAPO, and plan, measure and understand runs. --version prints the version."
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=_HELP)


def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train by DAPO. `run.dir` names the run directory, `run.resume=true` continues it."""
    from megatron_dapo.cli.train import STOP_SIGNALS, train_command

    code = train_command(config, overrides or [])
    for number in STOP_SIGNALS:  # Python takes a second to end; one more signal must not change the exit code
        signal.signal(number, signal.SIG_IGN)
    raise typer.Exit(code)


def preview(config: ConfigFile, overrides: Overrides = None, count: Annotated[int, typer.Option(min=1)] = 1) -> None:
    """Print prompts exactly as the server gets them: text, token ids, ground truth."""
    from megatron_dapo.coordinator.inputs import read_problems, remarks
    from megatron_dapo.data.tokenizer import load_text_tools

    loaded = config_of(config, overrides or [])
    text = load_text_tools(loaded.model.path, loaded.model.stop_token_ids)
    prompts, heldout = read_problems(loaded, text)
    order, stops = prompts.order(loaded.run.seed), list(text.stop_token_ids)
    shown = [prompts.prompts[order.index_at(position)] for position in range(count)]
    named = {"notes": remarks(loaded, prompts, heldout), "stops": stops, "limit": loaded.rollout.max_new_tokens}
    print(text_page("megatron_dapo.cli", "preview.txt.j2", prompts=prompts, shown=shown, **named), end="")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN ...", help="Run directories, drawn over each other.")],
    out: Annotated[Path | None, typer.Option(help="File to write; report.html in the first RUN if not given.")] = None,
    smooth: Annotated[int | None, typer.Option(min=1, help="Steps a line averages; else 1/50 of the run.")] = None,
) -> None:
    """Write runs, finished or not, as one HTML file that needs no network; runs that differ by seed alone as a band."""
    from megatron_dapo.report.page import report_page
    from megatron_dapo.report.source import Run

    file = out or runs[0] / "report.html"
    page = report_page([Run(folder) for folder in runs], smooth)
    try:
        file.write_text(page, encoding="utf-8", errors="backslashreplace")  # a path may have any bytes
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; name another place with --out", str(file)) from None
    print(str(file).encode(errors="backslashreplace").decode())


def check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Say whether a config is valid; print it with defaults filled in, and where every other value comes from."""
    from megatron_dapo.actor.model.hf_config import HFModelConfig, check_actor
    from megatron_dapo.config.load import dump_config, load_with_sources

    loaded, lines = load_with_sources(config, overrides or [])
    print(dump_config(loaded, lines), end="")
    ways = [loaded.way_of_weights(on_gpus=on_gpus) for on_gpus in (True, False)]
    print(f"# new weights reach the servers by: {ways[0]} on GPUs, {ways[1]} on a CPU (rollout.weight_sync)")
    if loaded.evaluation.path is None:
        print("# evaluation.path is not set: the run trains without held-out evaluation")
    if (Path(loaded.model.path) / "config.json").is_file():
        check_actor(HFModelConfig.load(Path(loaded.model.path)), loaded.actor)
    print("# weights, tokenizer, data and code of your own were not looked at: megatron-dapo doctor does that")


COMMANDS = (train, preview, ask, evaluate, status, diff, report, slurm, plan, doctor, check)
"""In the order of `--help`."""
for each in COMMANDS:
    app.command("eval" if each is evaluate else None)(each)


def main(commands: Callable[[], object] = app) -> None:
    """Entry point of `megatron-dapo`, and of tools that end as its commands do. An error that explains itself is
    printed without a traceback."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    # No option of ours has a dot: `--run.dir=x` can only mean `run.dir=x`.
    sys.argv[1:] = [re.sub(r"^--(?=[a-z_]+\.[\w.]+=)", "", word) for word in sys.argv[1:]]
    if sys.argv[1:] == ["--version"]:
        print(f"megatron-dapo {version('megatron-dapo')}")
        return
    try:
        commands()
    except Exception as error:
        if (code := exit_code_of(error)) is None:
            raise
        print(named(error), file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main()
