"""`make test-gpu`, or `python -m tests.gpu.runner.run_stages`: each stage in a process of its own, one page at the end.

A stage that crashes, hangs or leaves a broken CUDA context ends with its process; the next one starts anew. After each
stage the results are written: `results.json`, and `gpu.md` for a person. Where commands on the machine may only be
short, the same line is given again and again until nothing is left:

    python -m tests.gpu.runner.run_stages --resume --minutes 9.5

Environment variable OUT: a folder that gets a copy of both and `logs.tar.gz` after every stage.
"""

import argparse
import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from tests.gpu.runner import recorder
from tests.gpu.runner.gpu_page import page, table
from tests.gpu.runner.stages import STAGES, Stage

ROOT = Path(__file__).parents[3]
DEVICE = "GPU_TESTS_DEVICE"
"""Environment variable that the tests read: cuda (default) or cpu."""

UNFINISHED = ("interrupted", "not run")
DRIVER_S = 120.0
"""For torch to count the GPUs."""

GRACE_S = 10.0
"""For the processes of a stage that ended by itself to end too."""

_PR_SET_CHILD_SUBREAPER = 36


class Results:
    """results.json: what each stage found, over all commands that ran stages on this machine."""

    def __init__(self, folder: Path, device: str) -> None:
        """
        Raises:
            ValueError: the folder cannot be used, or its results.json is damaged or of another device type.
        """
        self.folder = folder
        self.file = folder / "results.json"
        self.all: dict[str, Any] = {"device": device, "commands": [], "stages": {}}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.file.exists():
                self.all = json.loads(self.file.read_text())
                if not (isinstance(self.all["commands"], list) and isinstance(self.all["stages"], dict)):
                    raise TypeError("commands must be a list, and stages an object")
                page(self.all), table(self.all)  # they read every field
        except OSError as error:
            raise ValueError(f"--folder {folder} cannot be used: {error}; name another one") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.file} is damaged ({why}): remove it, or name another --folder") from error
        if self.all["device"] != device:
            raise ValueError(f"{self.file} is of device {self.all['device']}, not {device}: name another --folder")

    def finished(self, stage: Stage) -> bool:
        found = self.all["stages"].get(stage.name)
        return found is not None and found["outcome"] not in UNFINISHED

    def put(self, stage: Stage, **found: Any) -> None:
        """Replaces what is known of a stage and writes everything."""
        plan = {"shows": stage.shows, "planned_s": stage.planned_s}
        self.all["stages"][stage.name] = plan | {"at": now(), "seconds": 0.0, "reason": "", "tests": {}} | found
        self.write()

    def put_unmeasured(self, stage: Stage, outcome: str, reason: str) -> None:
        """Like `put`, but a result that a run has measured stays."""
        if not self.finished(stage):
            self.put(stage, outcome=outcome, reason=reason)

    def write(self) -> None:
        beside = self.file.with_suffix(".part")
        beside.write_text(json.dumps(self.all, indent=1))
        beside.replace(self.file)
        (self.folder / "gpu.md").write_text(page(self.all))
        if out := os.environ.get("OUT"):
            Path(out).mkdir(parents=True, exist_ok=True)
            for name in ("results.json", "gpu.md"):
                shutil.copyfile(self.folder / name, Path(out) / name)
            with tarfile.open(Path(out) / "logs.tar.gz", "w:gz") as archive:
                for log in sorted(self.folder.glob("*.log")):
                    archive.add(log, log.name)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def run(
    stages: Iterable[Stage], results: Results, *, minutes: float, gpus: int, again: bool = True, python: str = ""
) -> list[str]:
    """Runs the stages one after the other until `minutes` are over; names of those that no time was left for.

    Args:
        gpus: visible GPUs; 0 with device cpu.
        again: also the stages that have a result; False is `--resume`.
        python: interpreter of the stages; empty: this one.
    """
    _adopt_orphans()
    began = time.monotonic()
    started = 0
    left_out = []
    for stage in stages:
        if not again and results.finished(stage):
            continue
        left = 60 * minutes - (time.monotonic() - began)
        if why_not := _why_not(stage, results.all["device"], gpus):
            results.put_unmeasured(stage, "skipped", why_not)
        elif left < stage.planned_s and (started or left <= 0):
            left_out.append(stage.name)
            why_not = f"planned {stage.planned_s} s, {max(0, left):.0f} s were left"
            results.put_unmeasured(stage, "not run", why_not)
            print(f"--- {stage.name}: not run, {why_not}", flush=True)
        else:
            started += 1
            results.put_unmeasured(stage, "interrupted", "the command ended in this stage")
            print(f"=== {stage.name}: {stage.shows} (planned {stage.planned_s} s)", flush=True)
            found = run_stage(stage, results, min(float(stage.deadline_s), left), python or sys.executable)
            results.put(stage, **found)
            print(f"--- {stage.name}: {found['outcome']} after {found['seconds']:.0f} s. {found['reason']}", flush=True)
    return left_out


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
        left_out = run(chosen, results, minutes=given.minutes, gpus=gpus, again=not given.resume)
    finally:
        command["seconds"] = round(time.monotonic() - began, 1)
        results.write()
        print(table(results.all), f"\n{results.file}\n{given.folder / 'gpu.md'}", flush=True)
    outcomes = {results.all["stages"][stage.name]["outcome"] for stage in chosen}
    return 0 if outcomes <= {"passed", "skipped"} and not left_out else 1


if __name__ == "__main__":
    sys.exit(main())
