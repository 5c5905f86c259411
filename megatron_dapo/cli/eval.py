"""`megatron-dapo eval`: how many held-out problems a model solves, and how sure that is."""

import asyncio
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console as Terminal
from rich.table import Table

from megatron_dapo.cli.exit_codes import ExitCode, exit_code_of
from megatron_dapo.cli.train import prepare_environment
from megatron_dapo.config import Config, ConfigError, load_config
from megatron_dapo.monitor.console import Console

if TYPE_CHECKING:
    from megatron_dapo.diagnostics.evaluation_session import Problems


KEPT = Path("evaluations") / ".kept"
"""In a run directory: the weights that an evaluation of it is about, until it is finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """As given on the command line."""

    model: Path | None = None
    out: Path | None = None
    watch: bool = False
    every: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is evaluated: `config.model.path` is where the tokenizer comes from."""

    config: Config
    weights: Path | None
    """None: what the servers of `rollout.urls` hold."""
    out: Path
    rollout_step: int | None = None


def eval_command(target: Path, overrides: Sequence[str], options: EvalOptions) -> ExitCode:
    """Evaluate, print, and say where the results are. The same command goes on where it was stopped."""
    prepare_environment()
    console = Console()
    try:
        asyncio.run(_with_signals(target, overrides, options, console))
    except ConfigError as error:
        console.error(str(error))
        return ExitCode.CONFIG
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.error("interrupted; the same command goes on with what is missing")
        return ExitCode.INTERRUPTED
    except Exception as error:
        code = exit_code_of(error)
        if code is None:
            raise
        if code is ExitCode.CONTINUE:
            console.note("stopped; the same command goes on with what is missing")
        else:
            console.error(f"{type(error).__name__}: {error}")
        return code
    return ExitCode.FINISHED


async def _with_signals(target: Path, overrides: Sequence[str], options: EvalOptions, console: Console) -> None:
    """The first SIGINT or SIGTERM stops what is under way, in order; a second one cancels it."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()
    task = asyncio.ensure_future(_evaluate(target, overrides, options, console, stop))

    def on_signal() -> None:
        if stop.done():
            task.cancel()
        else:
            stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await task


async def _evaluate(
    target: Path, overrides: Sequence[str], options: EvalOptions, console: Console, stop: "asyncio.Future[None]"
) -> None:
    from megatron_dapo.diagnostics.evaluation_session import evaluate_once
    from megatron_dapo.diagnostics.weight_snapshot import fingerprint

    if options.watch:
        await _watch(target, overrides, options, console, stop)
        return
    subject = find_subject(target, overrides, options)
    if subject.weights is not None:
        fingerprint(subject.weights)  # a folder that holds no model is said to be one before anything is read
    problems = _read(subject.config, console)
    console.note(f"evaluating {subject.weights or ', '.join(subject.config.rollout.urls)}")
    result = await evaluate_once(
        subject.config,
        problems,
        subject.out,
        weights=subject.weights,
        rollout_step=subject.rollout_step,
        stop=stop,
        report=console.note,
    )
    if subject.weights is not None and subject.weights.parent == target / KEPT:
        shutil.rmtree(subject.weights)
    _show(result)
    console.note(f"{subject.out}: result.json, problems.jsonl, responses.jsonl")


async def _watch(
    target: Path, overrides: Sequence[str], options: EvalOptions, console: Console, stop: "asyncio.Future[None]"
) -> None:
    from megatron_dapo.cluster.waits import StopRequested, Waits
    from megatron_dapo.diagnostics.evaluation_session import EvalSession, with_own_servers
    from megatron_dapo.diagnostics.evaluation_watch import Watch, watch_run
    from megatron_dapo.monitor.statistics import EVALUATIONS

    if options.model or options.out or not (target / "config.yaml").is_file():
        raise ConfigError(f"{target}: --watch takes the directory of a run, and neither --model nor --out")
    sync = load_config(target / "config.yaml").rollout.weight_sync
    if sync != "disk":
        raise ConfigError(
            f"{target}: rollout.weight_sync = {sync}, so its versions never are on disk; a run to be watched needs "
            "disk, and checkpoints can be evaluated with --model after tools/convert_checkpoint.py"
        )
    watch = Watch(target, every=options.every, report=console.note)

    def done(version: int, result: Mapping[str, Any]) -> None:
        console.note(f"version {version}:")
        _show(result)

    async def watching() -> None:
        first = await watch.first()
        if first is None:
            console.note(f"{target}: no version to evaluate, and the run does not go on")
            return
        config = with_own_servers(load_config(target / "config.yaml", overrides), first)
        problems = _read(config, console)
        async with EvalSession(config, problems, target / EVALUATIONS, Waits(stop), console.note) as session:
            await watch_run(session, watch, done)

    task = asyncio.ensure_future(watching())
    try:
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise StopRequested
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        watch.close()


def find_subject(target: Path, overrides: Sequence[str], options: EvalOptions) -> Subject:
    """Which weights are meant: --model, else the servers that `rollout.urls` names, else the run's newest.

    Raises:
        ConfigError: neither a config nor a run; a run that has no weights yet; options of which one would not be read.
    """
    from megatron_dapo.diagnostics.evaluation_session import with_own_servers
    from megatron_dapo.monitor.statistics import EVALUATIONS

    named = any(word.startswith("rollout.urls=") for word in overrides)
    if options.every > 1:
        raise ConfigError(f"--every {options.every}: says which versions --watch takes; give --watch, or leave it out")
    if options.model is not None and named:
        raise ConfigError(
            f"--model {options.model} and rollout.urls: those servers hold weights of their own; give one of both"
        )
    is_run = target.is_dir()
    if is_run and not (target / "config.yaml").is_file():
        raise ConfigError(f"{target}: no config.yaml there; give a config file, or the directory of a run")
    config = load_config(target / "config.yaml" if is_run else target, overrides)
    asks_servers = config.rollout.urls and (not is_run or named)
    if options.model is not None:
        out = options.out or Path("evaluations") / options.model.resolve().name
        return Subject(config=with_own_servers(config, options.model), weights=options.model, out=out)
    if asks_servers:
        return Subject(config=config, weights=None, out=options.out or Path("evaluations") / "servers")
    if not is_run:
        model = Path(config.model.path)
        out = options.out or Path("evaluations") / model.resolve().name
        return Subject(config=with_own_servers(config, model), weights=model, out=out)
    if (target / "summary.json").exists() and (target / "model").is_dir():
        weights, name, step = target / "model", "model", None
    else:
        step = _newest_kept(target)
        name, weights = f"v{step}", target / KEPT / f"v{step}"
    out = options.out or target / EVALUATIONS / name
    return Subject(config=with_own_servers(config, weights), weights=weights, out=out, rollout_step=step)


def _newest_kept(run: Path) -> int:
    """A version that an evaluation was stopped at, else the newest one, frozen."""
    from megatron_dapo.diagnostics.weight_snapshot import freeze, versions

    kept = versions(run / KEPT)
    if kept:
        return kept[-1]
    there = versions(run / "weights")
    if not there:
        raise ConfigError(
            f"{run}: no weights on disk; wait for the run's first ones (with rollout.weight_sync=disk), or give --model"
        )
    if not freeze(run / "weights" / f"v{there[-1]}", run / KEPT / f"v{there[-1]}"):
        raise ConfigError(f"{run}: version {there[-1]} was removed by the run meanwhile; try again")
    return there[-1]


def _read(config: Config, console: Console) -> "Problems":
    from megatron_dapo.coordinator.inputs import read_heldout
    from megatron_dapo.data.tokenizer import load_text_tools
    from megatron_dapo.diagnostics.evaluation_session import Problems

    text = load_text_tools(config.model.path, config.model.stop_token_ids)
    heldout = read_heldout(config, text)
    console.note(f"held-out problems: {heldout.summary()}")
    return Problems(text=text, heldout=heldout)


def _show(result: Mapping[str, Any]) -> None:
    table = Table(box=SIMPLE_HEAD)
    for head, justify in (("answers", "left"), ("figure", "left"), ("value", "right"), ("95% interval", "right")):
        table.add_column(head, justify="left" if justify == "left" else "right")
    for way, about in result["ways"].items():
        described = f"{way}, {about['problems']} problems x {about['samples']}"
        for name, figure in about["figures"].items():
            low, high = 100 * figure["low"], 100 * figure["high"]
            table.add_row(described, name, f"{100 * figure['value']:.1f}%", f"{low:.1f} to {high:.1f}")
            described = ""
        table.add_row("", "mean length", f"{about['mean_tokens']:.0f}", f"{about['truncated']:.1%} cut off")
    screen = Terminal(file=sys.stdout, highlight=False)
    screen.print(table)
