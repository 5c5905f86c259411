"""`megatron-dapo train`: one config, one run, one exit code; and what the signals do that ask a run to stop."""

import asyncio
import logging
import os
import resource
import secrets
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_dapo.cli.exit_codes import ExitCode, exit_code_of, named
from megatron_dapo.config import Config, load_config
from megatron_dapo.monitor.console import Console

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is what `sbatch --signal` is usually told to send ahead of the time limit."""


class StoppedEarly(BaseException):
    """A stop signal came before there was anything to save. No Exception: nobody may take it for an error of theirs."""


def heeded_signals() -> list[signal.Signals]:
    """Those of STOP_SIGNALS that this process is to heed: `nohup` wants its SIGHUP ignored. SIGINT is ignored in a
    script's background, where it must stop a run too."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number is not signal.SIGHUP or not ignored]


@contextmanager
def stop_at_once() -> Iterator[None]:
    """A stop signal raises StoppedEarly in the body, in the main thread, until the body sets handlers of its own: the
    system's own way would end the process with a code that says nothing of going on."""

    def on_signal(number: int, frame: object) -> None:
        raise StoppedEarly(signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in heeded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_command(path: Path, overrides: Sequence[str]) -> ExitCode:
    """Run it. Every known fault is one message and an exit code; a traceback means a fault of ours."""
    prepare_environment()
    console, again = Console(), _resume_command(path, overrides)
    try:
        with stop_at_once():
            _run(load_config(path, overrides), console)
    except StoppedEarly as stopped:
        console.note(f"{stopped}: stopped before the run began; continue with: {again}")
        return ExitCode.CONTINUE
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.error(f"interrupted; what was not saved is lost; continue with: {again}")
        return ExitCode.INTERRUPTED
    except Exception as error:
        if (code := exit_code_of(error)) is None:
            raise
        if code is ExitCode.CONTINUE:
            script = " (a batch job: by its script)" if "SLURM_JOB_ID" in os.environ else ""
            console.note(f"stopped; continue with: {again}{script}")
        else:
            console.error(named(error))
            if changed := getattr(error, "overrides", ()):
                console.note(f"continue with: {_resume_command(path, overrides, *changed)}")
        return code
    return ExitCode.FINISHED


def _resume_command(path: Path, overrides: Sequence[str], *changed: str) -> str:
    """`changed`: overrides that take the place of the user's."""
    last = {"run.resume": "run.resume=true", "run.resume_step": ""} | {one.partition("=")[0]: one for one in changed}
    kept = [override for override in overrides if override.partition("=")[0] not in last]
    return f"megatron-dapo train {shlex.join([str(path), *kept, *filter(None, last.values())])}"


def _run(config: Config, console: Console) -> None:
    console.note("reading model, prompts and held-out problems")
    # What a user may have got wrong is looked at before Ray and the rest are imported, which takes seconds.
    from megatron_dapo.coordinator.inputs import read_inputs, remarks, routing_room
    from megatron_dapo.data.hub import with_local_paths
    from megatron_dapo.storage.run_dir import STOP_FILE, RunDir, has_run

    forget_stop(Path(config.run.dir, STOP_FILE), console)
    if not config.run.resume and has_run(Path(config.run.dir)):
        RunDir(config.run.dir, resume=False).close()  # says whose run that is
    config = with_local_paths(config, Path(config.run.dir, "config.yaml") if config.run.resume else None)
    inputs = read_inputs(config)
    console.note(f"prompts: {inputs.prompts.summary()}")
    told = (*remarks(config, inputs.prompts, inputs.heldout), *routing_room(config, inputs.model))
    notes = (f"\nnote: {remark}" for remark in told)
    console.note(f"held-out problems: {inputs.heldout.summary()}{''.join(notes)}")
    from megatron_dapo.coordinator.run import run_with_restarts

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)

    async def until_stopped() -> None:
        stop = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(run_with_restarts(config, inputs, console, stop))
        save_on_signals(stop, task, console)
        await task

    asyncio.run(until_stopped())


def forget_stop(file: Path, console: Console) -> None:
    """Remove a request to stop from before this start. The batch script's, which holds the job's number, counts."""
    with suppress(OSError):  # none; or a folder that is refused where it is made
        if (job := file.read_text().strip()) == "" or job != os.environ.get("SLURM_JOB_ID"):
            file.unlink()
            console.note(f"removed {file}: it was made before this start; it stops a run that is at work")


def save_on_signals(stop: "asyncio.Future[None]", task: "asyncio.Task[Any]", console: Console) -> None:
    """From now on the first stop signal asks the run to save and stop; a second one cancels everything."""

    def on_signal(number: signal.Signals) -> None:
        if stop.done():
            task.cancel()
            return
        saved = "what was trained is saved first, a second signal ends at once"
        if number is signal.SIGTERM and "SLURM_JOB_ID" in os.environ:
            saved = "Slurm leaves no time to save: the file `stop` in the run directory stops a job saved"
        console.note(f"{number.name}: stopping; {saved}")
        stop.set_result(None)

    for number in heeded_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


def prepare_environment() -> None:
    """Settings that libraries read while they are imported, for this process and those it starts."""
    usual = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= usual | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"} | os.environ
    os.environ["HF_HUB_OFFLINE"] = "1"  # a run reads what it was given and never a hub
    os.environ["PYTHONSAFEPATH"] = "1"  # a file random.py in the working directory is not what a library asks for
    for name in ("PYTHONOPTIMIZE", "PYTHONWARNINGS"):  # Ray adds to docstrings; Megatron's warnings are no errors
        os.environ.pop(name, None)
    if "RAY_ADDRESS" not in os.environ:
        # Ray's name for "this machine alone". Else it takes the machine's own address, whatever address it is given,
        # and its processes listen on every interface.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["AUTOSCALER_METRIC_PORT"] = "-1"  # its figures would answer any user of the machine
    if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
        # Another user of this machine reaches the same loopback ports: only who knows the token may talk to our Ray.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # A connection for each running response: 64 servers with 256 each are more than the usual 1024 files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
