"""One run of the ladder, `megatron-dapo train` in a process of its own: where it stands, how it is made or resumed."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from examples.ablation.rungs import Place, Planned
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.cluster.heartbeat import read_heartbeat
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.load import flatten_config

ROOT = Path(__file__).parents[2]
BASE_SCRIPT = ROOT / "examples" / "quickstart" / "make_base.py"
DATA_SCRIPT = ROOT / "examples" / "quickstart" / "make_data.py"
MOST_STEPS = 7
"""Steps of the longest problems; those of six and seven hardly fit into `rollout.max_new_tokens`."""

FAILURE = "ladder_failure.json"
"""In the folder of a run that ended as its rung made it end: it diverged, or no group taught anything any more."""

SECONDS = "ladder_seconds.json"

MAY_CHANGE = {f"run.{key}" for key in ("dir", "resume", "rollout_steps", "max_restarts", "checkpoint_every")}
"""Keys that a continued run may have otherwise without being another experiment: the learning rate is constant, so that
a longer run begins as the shorter one did."""

_PR_SET_PDEATHSIG = 1


class State(StrEnum):
    NEW = "new"
    HALF = "half done"
    FINISHED = "finished"
    FAILED = "failed"


class LadderStopped(RuntimeError):
    """The ladder cannot go on here. The message says what to do; the same command goes on from there."""


def state_of(planned: Planned) -> State:
    """Where a run stands.

    Raises:
        LadderStopped: its folder holds a run with other settings.
    """
    folder = planned.folder
    if (folder / FAILURE).exists():
        return State.FAILED
    if not (folder / "config.yaml").exists():
        return State.HALF if (folder / "ledger.jsonl").exists() else State.NEW
    if changed := _other_settings(planned):
        raise LadderStopped(
            f"{folder}: was made with other settings ({'; '.join(changed)}); give the same ones, or another --out"
        )
    try:
        done = json.loads((folder / "summary.json").read_text())["rollout_steps"]
    except (OSError, ValueError, KeyError):
        return State.HALF
    wanted = planned.config().run.rollout_steps
    if done > wanted:
        raise LadderStopped(f"{folder}: has {done} rollout steps, {wanted} are asked for; give --steps {done} or more")
    return State.FINISHED if done == wanted else State.HALF


def _other_settings(planned: Planned) -> list[str]:
    file = planned.folder / "config.yaml"
    try:
        before = flatten_config(load_config(file))
    except ConfigError as error:
        raise LadderStopped(f"{file}: cannot be read ({error}); remove {planned.folder} to begin it anew") from None
    now = flatten_config(planned.config())
    return [
        f"{key} was {before.get(key)}, now {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in MAY_CHANGE
    ]


def make_inputs(place: Place, seed: int, *, base_steps: int | None = None) -> None:
    """Prompts and the base of one seed, if they are not there yet.

    Args:
        base_steps: optimizer steps of the base's teaching instead of the recipe's.
    """
    if not (place.data / "heldout.jsonl").exists():
        _make(DATA_SCRIPT, place.data, "--most-steps", str(MOST_STEPS))
    if not (place.base(seed) / "model.safetensors").exists():
        fewer = () if base_steps is None else ("--blurting-steps", str(base_steps))
        _make(BASE_SCRIPT, place.base(seed), "--recipe", "rambling", "--seed", str(seed), "--no-measured", *fewer)


def _make(script: Path, folder: Path, *arguments: str) -> None:
    """Written aside and renamed: a kill in between leaves nothing that looks whole."""
    aside = folder.with_name(f".{folder.name}.tmp")
    code, output = run_command(
        [sys.executable, str(script), "--out", str(aside), *arguments], aside.with_suffix(".log")
    )
    if code:
        raise LadderStopped(f"{script.name} ended with exit code {code}:\n{output[-2000:]}")
    os.replace(aside, folder)


def execute(planned: Planned) -> State:
    """Make the run, or go on with it from its newest checkpoint. Returns FINISHED or FAILED.

    Raises:
        LadderStopped: it was interrupted, or the machine or the settings made it fail, not the rung.
    """
    resume = ("run.resume=true",) if state_of(planned) is State.HALF else ()
    command = [
        sys.executable,
        "-m",
        "megatron_dapo.cli.main",
        "train",
        str(planned.rung.file),
        *planned.overrides,
        *resume,
    ]
    log = planned.folder.with_suffix(".log")
    began = time.monotonic()
    code, output = run_command(command, log)
    if code == ExitCode.FINISHED:
        _add_seconds(planned.folder, time.monotonic() - began)
        return State.FINISHED
    beat = read_heartbeat(planned.folder)
    error = (beat.error if beat else None) or output[-500:]
    if code == ExitCode.DIVERGED or error.startswith("OversamplingLimit"):
        (planned.folder / FAILURE).write_text(json.dumps({"exit_code": code, "error": error}, indent=2) + "\n")
        return State.FAILED
    if code in (ExitCode.CONTINUE, ExitCode.INTERRUPTED):
        raise LadderStopped(f"{planned.name}: stopped and saved; the same command goes on")
    raise LadderStopped(f"{planned.name}: exit code {code}, see {log}\n{error}\nThe same command tries it again.")


def _add_seconds(folder: Path, seconds: float) -> None:
    """Wall-clock time of the command that finished the run, process start and end included."""
    (folder / SECONDS).write_text(json.dumps({"wall": seconds}) + "\n")


def run_command(command: list[str], log: Path) -> tuple[int, str]:
    """Run a program to its end; its output goes to `log`. Returns exit code and output.

    SIGINT and SIGTERM are handed on, so that a run saves what it has; a program that ends well all the same counts as
    CONTINUE, for nothing is to follow it. Should this process be killed, the program is told to end too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        start = file.tell()
        process = subprocess.Popen(
            command,
            cwd=Path.cwd(),
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        with _handing_on(process) as asked:
            code = process.wait()
    if asked and code == 0:
        code = ExitCode.CONTINUE
    return code, log.read_bytes()[start:].decode(errors="replace")


def _end_with_parent() -> None:
    """In the child, before its program: the kernel tells it to save and end when this process is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def _handing_on(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Yields the signals that were handed on so far."""
    asked: list[int] = []

    def hand_on(number: int, _: object) -> None:
        asked.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
