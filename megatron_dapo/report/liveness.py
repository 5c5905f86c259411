"""Whether a run goes on: from its lock and its last sign of life."""

import re
import socket
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from megatron_dapo.cluster.heartbeat import Heartbeat
from megatron_dapo.monitor.console import duration
from megatron_dapo.storage.durable import LOCK_NAME

STALE_S = 30.0
"""A sign of life that is older than this says that a run on another machine is gone, or its coordinator stuck."""


class Liveness(NamedTuple):
    """Whether a run goes on, and how that is known."""

    alive: bool
    text: str


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
            held = str(lock) in {opened.path for opened in psutil.Process(pid).open_files()}
        except psutil.NoSuchProcess:
            held = False
        except psutil.AccessDenied:  # somebody else's process: the number has to do
            held = True
        if held:
            return pid
    return None


def liveness(beat: Heartbeat | None, holder: int | None, *, finished: bool, now: float | None = None) -> Liveness:
    """Whether the run goes on.

    Args:
        beat: last sign of life.
        holder: process that holds the lock on this machine.
        finished: whether `summary.json` is there.
        now: seconds since 1970; None: the clock.
    """
    age = (time.time() if now is None else now) - beat.written if beat else 0.0
    if holder is not None:
        stuck = beat and beat.pid == holder and age > STALE_S
        late = f"; no sign of life for {duration(age)}: the coordinator is busy or stuck" if stuck else ""
        return Liveness(True, f"running, process {holder} on this machine holds the lock{late}")
    if beat is None:
        none = "not running: no process of this machine holds the lock, and no status.json"
        return Liveness(False, "finished" if finished else none)
    when = f"({duration(abs(age))} {'ago' if age >= 0 else 'ahead of this clock'})"
    if beat.state != "running":
        how = {"stopped": "stopped and saved, continue with run.resume=true", "failed": "failed, see the last error"}
        return Liveness(False, f"{how.get(beat.state, beat.state)} {when}")
    process, elsewhere = f"process {beat.pid} on {beat.host}", beat.host != socket.gethostname()
    if elsewhere and abs(age) <= STALE_S:
        return Liveness(True, f"running, {process} {when}")
    unless = " (or its coordinator is stuck)" if elsewhere else ""
    sign = f"{process} gave its last sign of life {when}; look at the end of logs/, continue with run.resume=true"
    return Liveness(False, f"died without an error message{unless}: {sign}")
