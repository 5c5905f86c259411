"""`make test-gpu`, or `python -m tests.gpu.runner.run_stages`: each stage in a process of its own, one page at the end.

A stage that crashes, hangs or leaves a broken CUDA context ends with its process; the next one starts anew. After each
stage the results are written: `results.json`, and `gpu.md` for a person. Where commands on the machine may only be
short, the same line is given again and again until nothing is left:

    python -m tests.gpu.runner.run_stages --together --resume --minutes 9.5

With `--together` the stages run side by side, since most of each is imports and first compilations; those that need the
GPU's memory or quiet follow one after the other.

Environment variable OUT: a folder that gets a copy of both and `logs.tar.gz` after every stage.
"""

import argparse
import ctypes
import glob
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from tests.gpu.runner import recorder
from tests.gpu.runner.gpu_page import table
from tests.gpu.runner.results import Results, now
from tests.gpu.runner.stages import STAGES, Stage

ROOT = Path(__file__).parents[3]
DEVICE = "GPU_TESTS_DEVICE"
"""Environment variable that the tests read: cuda (default) or cpu."""

DRIVER_S = 120.0
"""For torch to count the GPUs."""

GRACE_S = 10.0
"""For the processes of a stage that ended by itself to end too."""

APART_S = 1.0
"""Between the starts of stages side by side."""

PATIENCE = 2
"""Their deadlines are this many times as long: they share the cores."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def run(
    stages: Iterable[Stage],
    results: Results,
    *,
    minutes: float,
    gpus: int,
    again: bool = True,
    python: str = "",
    together: bool = False,
) -> list[str]:
    """Runs the stages one after the other until `minutes` are over; names of those that no time was left for.

    Args:
        gpus: visible GPUs; 0 with device cpu.
        again: also the stages that have a result; False is `--resume`.
        python: interpreter of the stages; empty: this one.
        together: side by side first, but for those that run alone.
    """
    _adopt_orphans()
    python = python or sys.executable
    began = time.monotonic()
    started = 0
    left_out = []

    def left() -> float:
        return 60 * minutes - (time.monotonic() - began)

    def begins(stage: Stage) -> bool:
        nonlocal started
        if not again and results.finished(stage):
            return False
        if why_not := _why_not(stage, results.all["device"], gpus):
            results.put_unmeasured(stage, "skipped", why_not)
            return False
        if left() < stage.planned_s and (started or left() <= 0):
            left_out.append(stage.name)
            why_not = f"planned {stage.planned_s} s, {max(0, left()):.0f} s were left"
            results.put_unmeasured(stage, "not run", why_not)
            print(f"--- {stage.name}: not run, {why_not}", flush=True)
            return False
        started += 1
        results.put_unmeasured(stage, "interrupted", "the command ended in this stage")
        print(f"=== {stage.name}: {stage.shows} (planned {stage.planned_s} s)", flush=True)
        return True

    stages = list(stages)
    if together:
        _side_by_side((stage for stage in stages if not stage.alone and begins(stage)), results, left, python)
    for stage in stages:
        if not (together and not stage.alone) and begins(stage):
            found = run_stage(stage, results, min(float(stage.deadline_s), left()), python)
            results.put(stage, **found)
            _tell(stage, found)
    return left_out


def _tell(stage: Stage, found: dict[str, Any]) -> None:
    print(f"--- {stage.name}: {found['outcome']} after {found['seconds']:.0f} s. {found['reason']}", flush=True)


def _side_by_side(stages: Iterable[Stage], results: Results, left: Callable[[], float], python: str) -> None:
    """Each in a process of its own, so that what one stage leaves behind can be told from what another one runs."""
    running: dict[Any, tuple[Stage, BaseProcess]] = {}

    def take(timeout_s: float | None) -> None:
        for sentinel in wait(list(running), timeout_s):
            _take_over(*running.pop(sentinel), results)

    shutil.rmtree(results.folder / "together", ignore_errors=True)
    try:
        for stage in stages:
            given = (stage, results, min(float(PATIENCE * stage.deadline_s), left()), python, os.getpid())
            child = multiprocessing.get_context("fork").Process(target=_in_own_folder, args=given)
            child.start()
            running[child.sentinel] = (stage, child)
            take(APART_S)
        while running:
            take(None)
    finally:
        for _, child in running.values():
            child.terminate()
        for _, child in running.values():
            child.join(GRACE_S)
        _end_all(0.0)


def _own_folder(stage: Stage, results: Results) -> Path:
    return results.folder / "together" / stage.name


def _in_own_folder(stage: Stage, results: Results, deadline_s: float, python: str, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return
    _adopt_orphans()
    os.environ.pop("OUT", None)
    own = Results(_own_folder(stage, results), results.all["device"])
    own.put(stage, **run_stage(stage, own, deadline_s, python))


def _take_over(stage: Stage, child: BaseProcess, results: Results) -> None:
    """Brings what an ended child found, and its log, to where a stage on its own has them."""
    child.join()
    own = _own_folder(stage, results)
    for file in own.glob(f"{glob.escape(stage.name)}.*"):
        file.replace(results.folder / file.name)
    try:
        found = json.loads((own / "results.json").read_text())["stages"][stage.name]
    except (OSError, ValueError, KeyError):
        found = {"outcome": "interrupted", "reason": f"its process ended with code {child.exitcode}", "seconds": 0.0}
        results.put_unmeasured(stage, found["outcome"], found["reason"])
    else:
        results.put(stage, **found)
    shutil.rmtree(own, ignore_errors=True)
    _tell(stage, found)


def _why_not(stage: Stage, device: str, gpus: int) -> str:
    if device == "cpu":
        return "" if stage.cpu else "runs on GPUs only"
    return "" if gpus >= stage.gpus else f"needs {stage.gpus} GPUs, {gpus} visible"


def run_stage(stage: Stage, results: Results, deadline_s: float, python: str) -> dict[str, Any]:
    """What one stage found: outcome (passed, failed, crashed, timed out), seconds, reason, tests, figures."""
    record = results.folder / f"{stage.name}.jsonl"
    log = results.folder / f"{stage.name}.log"
    record.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-p", recorder.__name__, "-p", "no:cacheprovider", "-m", "gpu"]
    command += ["--tb=short", "-rs", "-v", *stage.tests]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    added = {recorder.RECORD: str(record), DEVICE: results.all["device"], "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | added,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            left = _end_all(GRACE_S if child.poll() is not None else 0.0)
            child.wait()
    found = _read(record)
    outcome, reason = _judge(code, found["tests"], found.pop("running"), deadline_s)
    if left and outcome == "passed":
        outcome, reason = "failed", f"processes were left behind: {', '.join(left)[:300]}"
    return found | {"outcome": outcome, "reason": reason, "seconds": round(time.monotonic() - began, 1)}


def _read(record: Path) -> dict[str, Any]:
    tests: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    running = ""
    for text in record.read_text().splitlines() if record.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:  # cut by a kill
            continue
        if "started" in line:
            running = line["started"]
        elif "figure" in line:
            figures[line["figure"]] = line["value"]
        else:
            # A failing tear-down comes after a passed call and stays.
            tests[line["test"]] = {key: line[key] for key in ("outcome", "seconds", "reason")}
    return {"tests": tests, "figures": figures, "running": "" if running in tests else running}


def _judge(code: int | None, tests: dict[str, Any], running: str, deadline_s: float) -> tuple[str, str]:
    where = f" in {running}" if running else ""
    failed = [f"{name}: {test['reason']}" for name, test in tests.items() if test["outcome"] == "failed"]
    if code is None:
        return "timed out", f"killed after {deadline_s:.0f} s{where}"
    if code < 0:
        return "crashed", f"{signal.Signals(-code).name}{where}"
    if failed:
        return "failed", "; ".join(failed)[:400]
    if code == 0 and tests and all(test["outcome"] == "skipped" for test in tests.values()):
        return "skipped", "; ".join(sorted({test["reason"] for test in tests.values()}))[:300]
    if code == 0 and tests:
        return "passed", ""
    return "failed", f"pytest ended with code {code}{where}, see the log"


def _adopt_orphans() -> None:
    """Whatever a stage's processes start stays below this process, also when its own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_all(grace_s: float) -> list[str]:
    """Kills every process below this one that still runs after `grace_s`; their command lines."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(map(_alive, psutil.Process().children(recursive=True))):
        time.sleep(0.1)
    seen: dict[int, str] = {}
    for _ in range(50):  # the children of a killed process appear only afterwards
        alive = [child for child in psutil.Process().children(recursive=True) if _alive(child)]
        if not alive:
            break
        for child in alive:
            try:
                seen[child.pid] = " ".join(child.cmdline())[:80]
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, 1)
    return list(seen.values())


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def visible_gpus() -> int:
    """Asked in a child: a CUDA context of this process would take memory from the stages.

    Raises:
        ValueError: torch cannot be imported, or the driver does not answer.
    """
    code = "import torch; print(torch.cuda.device_count())"
    command = [sys.executable, "-c", code]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = child.communicate(timeout=DRIVER_S)
    except subprocess.TimeoutExpired:
        child.kill()  # and no wait: a process that hangs in the driver may not end
        raise ValueError(f"torch did not count the GPUs within {DRIVER_S:.0f} s: does nvidia-smi answer?") from None
    if child.returncode:
        last = errors.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise ValueError(f"{sys.executable} cannot ask torch for the GPUs: {last[0]}")
    return int(output.split()[-1])


def minutes(text: str) -> float:
    """An argument above 0; argparse names this function in its message."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return float(text)


def main(arguments: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Exit code 0: every stage of the command passed or was skipped; 1: not; 2: the command itself is wrong."""
    parser = argparse.ArgumentParser(
        prog="run_stages", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [stage.name for stage in stages]
    parser.add_argument("--stages", default=",".join(names), help=f"some of them, by comma: {', '.join(names)}")
    parser.add_argument("--together", action="store_true", help="side by side, but for those that need the GPU alone")
    parser.add_argument("--resume", action="store_true", help="only the stages that have no result yet")
    parser.add_argument("--minutes", type=minutes, default=25, help="of the whole command (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, some stages")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu", help="of results and logs (%(default)s)")
    given = parser.parse_args(arguments)
    wanted = [name.strip() for name in given.stages.split(",") if name.strip()]
    if not wanted:
        parser.error(f"--stages names none; there are {', '.join(names)}")
    if unknown := set(wanted) - set(names):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    try:
        gpus = 0 if given.device == "cpu" else visible_gpus()
        if given.device == "cuda" and not gpus:
            parser.error("torch sees no CUDA device; --device cpu runs some stages at small sizes without one")
        results = Results(given.folder, given.device)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the stage's processes end too, and its state is written
    began = time.monotonic()
    command: dict[str, Any] = {"at": now(), "line": " ".join(["run_stages", *(arguments or sys.argv[1:])])}
    results.all["commands"].append(command)
    chosen = [stage for stage in stages if stage.name in wanted]
    try:
        again, together = not given.resume, given.together
        left_out = run(chosen, results, minutes=given.minutes, gpus=gpus, again=again, together=together)
    finally:
        command["seconds"] = round(time.monotonic() - began, 1)
        results.write()
        print(table(results.all), f"\n{results.file}\n{given.folder / 'gpu.md'}", flush=True)
    outcomes = {results.all["stages"][stage.name]["outcome"] for stage in chosen}
    return 0 if outcomes <= {"passed", "skipped"} and not left_out else 1


if __name__ == "__main__":
    sys.exit(main())
