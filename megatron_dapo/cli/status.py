"""`megatron-dapo status`: where a run is, what it waits for, what went wrong, what looks wrong."""

import re
import socket
import subprocess
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console

from megatron_dapo.cluster.heartbeat import FILE, INTERVAL_S, Heartbeat, read_heartbeat
from megatron_dapo.monitor.console import QUIET_S, RECENT, duration, step_line, text_page
from megatron_dapo.monitor.health import HealthMonitor
from megatron_dapo.report.source import RUN_FILES, ReportError, Run
from megatron_dapo.storage.durable import LOCK_NAME
from megatron_dapo.storage.run_dir import newest_step

STALE_S = 30.0
"""A sign of life that is older than this says that a run on another machine is gone, or its coordinator stuck."""


def lock_holder(folder: Path) -> int | None:
    """Process of this machine that holds the run directory's lock. Looks only: a run that starts is not disturbed."""
    try:
        lock = (folder / LOCK_NAME).resolve()
        inode, table = lock.stat().st_ino, Path("/proc/locks").read_text()
    except OSError:
        return None
    # 3: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF
    for pid in map(int, re.findall(rf"^\d+: \w+ +\w+ +\w+ +(\d+) \S+:{inode} ", table, re.MULTILINE)):
        try:  # another file system may have the same inode number
            if str(lock) in {opened.path for opened in psutil.Process(pid).open_files()}:
                return pid
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:  # somebody else's process: the number has to do
            return pid
    return None


def liveness(beat: Heartbeat | None, holder: int | None, *, finished: bool, now: float) -> tuple[bool, str]:
    """Whether the run goes on, and how that is known.

    Args:
        beat: last sign of life.
        holder: process that holds the lock on this machine.
        finished: whether `summary.json` is there.
        now: seconds since 1970.
    """
    age = now - beat.written if beat else 0.0
    if holder is not None:
        stuck = beat and beat.pid == holder and age > STALE_S
        late = f"; no sign of life for {duration(age)}: the coordinator is busy or stuck" if stuck else ""
        return True, f"running, process {holder} on this machine holds the lock{late}"
    if beat is None:
        none = "not running: no process of this machine holds the lock, and no status.json"
        return False, "finished" if finished else none
    when = f"({duration(abs(age))} {'ago' if age >= 0 else 'ahead of this clock'})"
    again = "run.resume=true" if beat.rollout_steps else "the same command"  # an evaluation alone has no steps
    if beat.state != "running":
        how = {"stopped": f"stopped and saved, continue with {again}", "failed": "failed, see the last error"}
        how["ended"] = f"ended at once, unsaved; continue with {again}"
        return False, f"{how.get(beat.state, beat.state)} {when}"
    process, elsewhere = f"process {beat.pid} on {beat.host}", beat.host != socket.gethostname()
    if elsewhere and abs(age) <= STALE_S:
        return True, f"running, {process} {when}"
    if finished:  # it was killed while it was closing
        return False, f"finished {when}"
    unless = " (or its coordinator is stuck)" if elsewhere else ""
    sign = f"{process} gave its last sign of life {when}; look at the end of logs/, continue with {again}"
    return False, f"died without an error message{unless}: {sign}"


SILENT_S = 600.0
"""So long a run on another machine may give no sign of life: clocks differ, and shared disks show files late."""

LOG_LINES = 4
"""Shown of a job's end: Slurm's own lines follow the reason."""


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    follow: Annotated[bool, typer.Option("--follow", help="Again and again, until it is finished.")] = False,
) -> None:
    """Say where a run is, alive or dead: progress, what it waits for and since when, the last error, alarms.

    --follow waits for a job that has not begun, and goes on over Slurm's requeueing until the run is finished."""
    screen = Console(highlight=False, soft_wrap=True)
    with suppress(KeyboardInterrupt):
        while _show(screen, run, clear=follow) and follow:
            time.sleep(INTERVAL_S if screen.is_terminal else QUIET_S)


def _may_go_on(log: Path) -> bool:
    """Whether the newest Slurm job says that it goes back into the queue, or has written something just now; not where
    Slurm has no job of the run any more."""
    last = log.read_text(errors="replace")[-2000:]
    requeued = "going back into the queue" in last.replace("not going back", "") or "DUE TO" in last
    recent = time.time() - log.stat().st_mtime < SILENT_S
    return (requeued or recent) and _has_job(log, int(time.time() / QUIET_S))


@lru_cache(maxsize=1)
def _has_job(log: Path, _period: int) -> bool:
    """Whether Slurm has a job, waiting or running, that writes beside `log`; also where Slurm cannot be asked."""
    command = ["squeue", "--noheader", "--Format=stdout:4096"]
    with suppress(OSError, KeyError, subprocess.SubprocessError):
        command += [f"--user={log.owner()}"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=QUIET_S, check=True).stdout
        return f"{log.parent.resolve()}/" in found
    return True


def _job_log(log: Path | None) -> str:
    """Where the newest Slurm job says why it ended, and its last lines; empty without one."""
    last = log.read_text(errors="replace")[-2000:].splitlines()[-LOG_LINES:] if log else []
    return "\n".join([f"what its job says: {log}", *last]) if log else ""


def _show(screen: Console, folder: Path, *, clear: bool) -> bool:
    """Whether the run goes on, or may: Slurm may start it, or start it again. `clear`: a terminal first."""
    log = max((folder / "logs").glob("slurm-*.log"), key=lambda log: log.stat().st_mtime, default=None)
    if (folder / "logs").is_dir() and not any((folder / name).exists() for name in RUN_FILES):
        job = _job_log(log) or "its job waits in the queue, or was not submitted"
        if not clear or (log and not _may_go_on(log)):
            raise ReportError(f"{folder}: no run has begun there; {job}")
        screen.clear()
        screen.print(f"{folder}: no run has begun there yet; {job}", markup=False)
        return True
    beat = read_heartbeat(folder)
    try:
        run = Run(folder)
        checkpoint = newest_step(folder)
    except OSError as error:
        raise ReportError(f"{error.filename}: {error.strerror}; ask the owner of the run to let you read it") from None
    alive, said = liveness(beat, lock_holder(folder), finished=bool(run.summary), now=time.time())
    alarms = HealthMonitor(run.lines, **run.alarm_bounds).alarms
    job = "" if alive or said.startswith("finished") else _job_log(log)
    going = bool(job and log and _may_go_on(log))
    ended = "ended by SIGTERM" if "CANCELLED AT" in job else "died without an error message"
    shown = said.replace("died without an error message", ended) + ("; Slurm may start it again" if going else "")
    planned = beat.rollout_steps if beat else run.planned
    named: dict[str, Any] = {"run": run, "beat": beat, "alive": alive, "alarms": alarms, "planned": planned}
    named |= {"checkpoint": checkpoint, "newest": _newest_step(run, max(planned or 0, run.steps)), "file": FILE}
    named |= {"folder": str(folder.resolve()), "state": [shown, *job.splitlines()], "now": time.time()}
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(beat.error_at or 0)) if beat else ""
    text = text_page("megatron_dapo.cli", "status.txt.j2", error_at=at, **named)
    if clear:  # everything is there at once
        screen.clear()
    screen.print(text, emoji=False, end="")
    if beat is not None and beat.state == "running" and beat.host != socket.gethostname():
        going = going or time.time() - beat.written < SILENT_S
    return alive or going


def _newest_step(run: Run, total: int) -> list[str]:
    """As the run printed it; empty without a step, or where its line lacks some of the figures."""
    recent = [line["timing/step"] for line in run.lines[-RECENT:] if line.get("timing/step")]
    with suppress(KeyError, TypeError, ZeroDivisionError):
        left = (total - run.steps) * sum(recent) / len(recent)
        return [step_line(run.lines[-1], total=total, seconds_left=left)]
    return []
