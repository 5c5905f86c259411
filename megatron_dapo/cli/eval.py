"""`megatron-dapo eval`: how many held-out problems a model solves, and how sure that is."""

import asyncio
import math
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_dapo.cli.command_line import Overrides
from megatron_dapo.cli.exit_codes import ExitCode, exit_code_of
from megatron_dapo.config import Config, ConfigError, load_config

if TYPE_CHECKING:
    from megatron_dapo.data.prompts import PromptSet
    from megatron_dapo.data.tokenizer import TextTools
    from megatron_dapo.monitor.console import Console

KEPT = Path("evaluations") / ".kept"
"""In a run directory: the weights that an evaluation of it is about, until it is finished."""

AGAIN = "the same command goes on with what is missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalTarget:
    """What is evaluated: `config.model.path` is where the tokenizer comes from."""

    config: Config
    weights: Path | None
    """None: what the servers of `rollout.urls` hold."""
    out: Path
    rollout_step: int | None = None


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="Config file, or run directory.")],
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Folder in Hugging Face format; else the run's newest.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; else RUN/evaluations/...")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Each new version of a run that goes on, as it comes.")
    ] = False,
    every: Annotated[int, typer.Option(min=1, help="With --watch: only versions of this multiple.")] = 1,
) -> None:
    """avg@k, pass@k and cons@k of held-out problems, with intervals: of a run, a model, or servers in rollout.urls."""
    from megatron_dapo.cli.train import prepare_environment
    from megatron_dapo.monitor.console import Console

    prepare_environment()
    console, given = Console(), overrides or []

    async def command(stop: "asyncio.Future[None]") -> None:
        if not watch:
            found = find_target(target, given, model=model, out=out, every=every)
            await _evaluate_once(target, found, console, stop)
        elif model or out or not (target / "config.yaml").is_file():
            raise ConfigError(f"{target}: --watch takes the directory of a run, and neither --model nor --out")
        else:
            await _watch(target, given, every, console, stop)

    try:
        asyncio.run(_with_signals(command))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.error(f"interrupted; {AGAIN}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        if code is ExitCode.CONTINUE:
            console.note(f"stopped; {AGAIN}")
        else:
            console.error(str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}")
        raise typer.Exit(code) from None


async def _with_signals(command: Callable[["asyncio.Future[None]"], Awaitable[None]]) -> None:
    """The first SIGINT or SIGTERM stops what is under way, in order; a second one cancels it."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()
    task = asyncio.ensure_future(command(stop))

    def on_signal() -> None:
        if stop.done():
            task.cancel()
        else:
            stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await task


async def _evaluate_once(target: Path, found: EvalTarget, console: "Console", stop: "asyncio.Future[None]") -> None:
    from megatron_dapo.cluster.waits import Waits
    from megatron_dapo.diagnostics.evaluation_session import evaluation_session
    from megatron_dapo.diagnostics.weight_snapshot import fingerprint

    config, weights, out = found.config, found.weights, found.out
    if weights is not None:
        fingerprint(weights)  # a folder that holds no model is said to be one before anything is read
    text, heldout = _read(config, console)
    console.note(f"evaluating {weights or ', '.join(config.rollout.urls)}")
    async with evaluation_session(config, text, heldout, out, Waits(stop), console.note) as session:
        result = await session.evaluate(out, weights=weights, rollout_step=found.rollout_step)
    if weights is not None and weights.parent == target / KEPT:
        shutil.rmtree(weights)
    _show(result)
    console.note(f"{out}: result.json, problems.jsonl, responses.jsonl")


async def _watch(
    target: Path, overrides: Sequence[str], every: int, console: "Console", stop: "asyncio.Future[None]"
) -> None:
    from megatron_dapo.cluster.waits import Waits
    from megatron_dapo.diagnostics.evaluation_session import Watch, evaluation_session
    from megatron_dapo.diagnostics.local_jobs import with_own_servers
    from megatron_dapo.monitor.statistics import EVALUATIONS

    sync = load_config(target / "config.yaml").rollout.weight_sync
    if sync != "disk":
        raise ConfigError(
            f"{target}: rollout.weight_sync = {sync}, so its versions never are on disk; a run to be watched needs "
            "disk, and checkpoints can be evaluated with --model after tools/convert_checkpoint.py"
        )
    watch, waits = Watch(target, every=every, report=console.note), Waits(stop)

    def done(version: int, result: Mapping[str, Any]) -> None:
        console.note(f"version {version}:")
        _show(result)

    async def watching() -> None:
        first = await watch.first()
        if first is None:
            console.note(f"{target}: no version to evaluate, and the run does not go on")
            return
        config = with_own_servers(load_config(target / "config.yaml", overrides), first)
        text, heldout = _read(config, console)
        async with evaluation_session(config, text, heldout, target / EVALUATIONS, waits, console.note) as session:
            await watch.evaluate(session, done)

    try:
        await waits.wait_for("end of the watched run", "the run", math.inf, watching(), stoppable=True)
    finally:
        watch.close()


def find_target(
    target: Path, overrides: Sequence[str], *, model: Path | None = None, out: Path | None = None, every: int = 1
) -> EvalTarget:
    """Which weights are meant: --model, else the servers that `rollout.urls` names, else the run's newest.

    Raises:
        ConfigError: neither a config nor a run; a run that has no weights yet; options of which one would not be read.
    """
    from megatron_dapo.diagnostics.local_jobs import with_own_servers
    from megatron_dapo.monitor.statistics import EVALUATIONS

    named = any(word.startswith("rollout.urls=") for word in overrides)
    if every > 1:
        raise ConfigError(f"--every {every}: says which versions --watch takes; give --watch, or leave it out")
    if model is not None and named:
        raise ConfigError(
            f"--model {model} and rollout.urls: those servers hold weights of their own; give one of both"
        )
    is_run = target.is_dir()
    if is_run and not (target / "config.yaml").is_file():
        raise ConfigError(f"{target}: no config.yaml there; give a config file, or the directory of a run")
    config = load_config(target / "config.yaml" if is_run else target, overrides)
    if model is None and config.rollout.urls and (named or not is_run):
        return EvalTarget(config=config, weights=None, out=out or Path(EVALUATIONS) / "servers")
    step = None
    if model is None and is_run:
        weights, step = _weights_of_run(target)
        out = out or target / EVALUATIONS / weights.name
    else:
        weights = model or Path(config.model.path)
    return EvalTarget(
        config=with_own_servers(config, weights),
        weights=weights,
        out=out or Path(EVALUATIONS) / weights.resolve().name,
        rollout_step=step,
    )


def _weights_of_run(run: Path) -> tuple[Path, int | None]:
    """The exported model, else a version at which an evaluation was stopped, else a snapshot of the newest one; and
    the version's number."""
    from megatron_dapo.diagnostics.weight_snapshot import newest_weights, snapshot, versions

    newest, kept = newest_weights(run), versions(run / KEPT)
    if newest is not None and newest[1] is None:
        return newest
    if kept:
        return run / KEPT / f"v{kept[-1]}", kept[-1]
    if newest is None:
        raise ConfigError(
            f"{run}: no weights on disk; wait for the run's first ones (with rollout.weight_sync=disk), or give --model"
        )
    source, version = newest
    if not snapshot(source, run / KEPT / source.name):
        raise ConfigError(f"{run}: version {version} was removed by the run meanwhile; try again")
    return run / KEPT / source.name, version


def _read(config: Config, console: "Console") -> "tuple[TextTools, PromptSet]":
    """The tokenizer and the held-out problems."""
    from megatron_dapo.coordinator.inputs import read_heldout
    from megatron_dapo.data.tokenizer import load_text_tools

    text = load_text_tools(config.model.path, config.model.stop_token_ids)
    heldout = read_heldout(config, text)
    console.note(f"held-out problems: {heldout.summary()}")
    return text, heldout


def _show(result: Mapping[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console as Terminal
    from rich.table import Table

    table = Table("answers", "figure", box=SIMPLE_HEAD)
    table.add_column("value", justify="right")
    table.add_column("95% interval", justify="right")
    for mode, about in result["ways"].items():
        described = f"{mode}, {about['problems']} problems x {about['samples']}"
        for name, figure in about["figures"].items():
            value, low, high = (100 * figure[key] for key in ("value", "low", "high"))
            table.add_row(described, name, f"{value:.1f}%", f"{low:.1f} to {high:.1f}")
            described = ""
        table.add_row("", "mean length", f"{about['mean_tokens']:.0f}", f"{about['truncated']:.1%} cut off")
    Terminal(file=sys.stdout, highlight=False).print(table)
