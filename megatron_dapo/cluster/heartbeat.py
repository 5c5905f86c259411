"""status.json: every few seconds what the run waits for, and at its end how it ended; `megatron-dapo status` reads it.

Written by the event loop itself: a file that grows old while its process lives says that the coordinator is busy or
stuck.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from megatron_dapo.cluster.waits import StopRequested, Waits
from megatron_dapo.monitor.console import Console, Count
from megatron_dapo.storage.durable import replace_file
from megatron_dapo.storage.run_dir import RunDir, RunDirError

FILE, INTERVAL_S = "status.json", 2.0
ELSEWHERE_S = 3 * INTERVAL_S
"""How long a run that another machine may hold is watched for a further sign of life."""


@dataclass(kw_only=True)
class Heartbeat:
    """What status.json holds. Times are seconds since 1970."""

    pid: int
    host: str
    started: float
    written: float = 0.0
    state: str = "running"
    """`running`, `finished`, `stopped` (by a signal, saved), `ended` (by two) or `failed`."""
    rollout_steps: int
    waits: list[str] = field(default_factory=list)
    """Open waits when it was written, oldest first."""
    progress: dict[str, Count] = field(default_factory=dict)
    """How far the run is, and those waits of which that is known: {"run": {"done": 3, "total": 12, "unit":
    "rollout steps", "figures": {"time_left_s": 41.2}}, "trainer update": {"done": 5, "total": 16, ...}}."""
    note: str = ""
    """The newest line that the run printed besides its steps: "server http://... is down: ...; restarting it"."""
    error: str | None = None
    """The last error, also of an earlier start of the same run."""
    error_at: float | None = None
    earlier_s: float = 0.0
    """Seconds of the earlier starts of the same run."""


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """The last sign of life; None if there is none that can be read."""
    with suppress(OSError, ValueError):
        return TypeAdapter(Heartbeat).validate_json((folder / FILE).read_bytes())
    return None


async def refuse_live_elsewhere(run_dir: RunDir) -> None:
    """What the lock does on file systems whose locks do not reach beyond a machine (NFS and Lustre can be mounted so).

    Waits only where the last sign of life is another machine's and its run had no end. Clocks are not compared.

    Raises:
        RunDirError: a run on another machine gives signs of life in this directory.
    """
    before = read_heartbeat(run_dir.path)
    if before is None or before.state != "running" or before.host == socket.gethostname():
        return
    for _ in range(round(4 * ELSEWHERE_S / INTERVAL_S)):  # on a shared disk a read may fail
        await asyncio.sleep(INTERVAL_S / 4)
        now = read_heartbeat(run_dir.path)
        if now is not None and now.state == "running" and now.written != before.written:
            holder = f"a live run holds it (process {now.pid} on {now.host}), though its lock is not seen here"
            raise RunDirError(f"run.dir = {run_dir.path}: {holder}; wait for it or choose another")


@asynccontextmanager
async def heartbeat(folder: Path, waits: Waits, rollout_steps: int, console: Console) -> AsyncIterator[Heartbeat]:
    """Writes `status.json` as long as the body runs; an error that leaves the body is its last entry, and goes on.

    Args:
        waits: whose open waits are written down.
        rollout_steps: how many the run is to make; 0: it is an evaluation alone.
        console: shows `Heartbeat.progress` each time.
    """
    earlier = read_heartbeat(folder)
    beat = Heartbeat(pid=os.getpid(), host=socket.gethostname(), started=time.time(), rollout_steps=rollout_steps)
    if earlier:
        beat.error, beat.error_at = earlier.error, earlier.error_at
        beat.earlier_s = earlier.earlier_s + max(0.0, earlier.written - earlier.started)
    waits.on_blocking = lambda: _show(folder, waits, beat, console)
    beating = asyncio.create_task(_beat(folder, waits, beat, console))
    try:
        yield beat
        beat.state = "finished"
    except (StopRequested, asyncio.CancelledError) as ending:
        beat.state = "stopped" if isinstance(ending, StopRequested) else "ended"
        raise
    except BaseException as error:
        beat.state, beat.error, beat.error_at = "failed", f"{type(error).__name__}: {error}", time.time()
        raise
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        _write(folder, beat, [], console.run)


async def _beat(folder: Path, waits: Waits, beat: Heartbeat, console: Console) -> None:
    while True:
        _show(folder, waits, beat, console)
        await asyncio.sleep(INTERVAL_S)


def _show(folder: Path, waits: Waits, beat: Heartbeat, console: Console) -> None:
    counts = dict(console.run)
    with suppress(Exception):  # the sign of life matters more than how far a work is
        counts |= waits.counts()
    beat.note = console.noted
    _write(folder, beat, waits.lines(), counts)
    with suppress(OSError, ValueError):  # what the run itself prints says that its output cannot be written
        console.working(beat.progress)


def _write(folder: Path, beat: Heartbeat, waits: list[str], progress: dict[str, Count]) -> None:
    beat.written, beat.waits, beat.progress = time.time(), waits, progress
    # A full disk must not end a run whose own files still fit, nor hide the error that it is ending with.
    with suppress(OSError):
        replace_file(folder / FILE, json.dumps(asdict(beat), indent=2) + "\n", durable=False)
