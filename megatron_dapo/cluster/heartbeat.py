"""status.json: every few seconds what the run waits for, and at its end how it ended; `megatron-dapo status` reads it.

Written by the event loop itself: a file that grows old while its process lives says that the coordinator is busy or
stuck.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megatron_dapo.cluster.waits import StopRequested, Waits
from megatron_dapo.monitor.run_status import Heartbeat, read_heartbeat
from megatron_dapo.storage.run_dir import RunDir, RunDirError

INTERVAL_S = 2.0


ELSEWHERE_S = 3 * INTERVAL_S
"""How long a run that another machine may hold is watched for a further sign of life."""


async def refuse_live_elsewhere(run_dir: RunDir) -> None:
    """What the lock does on file systems whose locks do not reach beyond a machine (NFS and Lustre can be mounted so).

    Waits only where the last sign of life is another machine's and its run had no end. Clocks are not compared.

    Raises:
        RunDirError: a run on another machine gives signs of life in this directory.
    """
    before = read_heartbeat(run_dir.path)
    if before is None or before.state != "running" or before.host == socket.gethostname():
        return
    waited = 0.0
    while waited < ELSEWHERE_S:
        await asyncio.sleep(INTERVAL_S / 4)
        waited += INTERVAL_S / 4
        now = read_heartbeat(run_dir.path)
        if now is not None and now.state == "running" and now.written != before.written:
            raise RunDirError(
                f"run.dir = {run_dir.path}: a live run holds it (process {now.pid} on {now.host}), though its lock is "
                "not seen here; wait for it or choose another"
            )


@asynccontextmanager
async def heartbeat(run_dir: RunDir, waits: Waits, rollout_steps: int) -> AsyncIterator[None]:
    """Writes `status.json` as long as the body runs; an error that leaves the body is its last entry, and goes on.

    Args:
        waits: whose open waits are written down.
        rollout_steps: how many the run is to make.
    """
    earlier = read_heartbeat(run_dir.path)
    beat = Heartbeat(
        pid=os.getpid(),
        host=socket.gethostname(),
        started=time.time(),
        written=time.time(),
        state="running",
        rollout_steps=rollout_steps,
        waits=[],
        error=earlier.error if earlier else None,
        error_at=earlier.error_at if earlier else None,
    )
    beating = asyncio.create_task(_beat(run_dir, waits, beat))
    try:
        yield
        beat.state = "finished"
    except (StopRequested, asyncio.CancelledError):
        beat.state = "stopped"
        raise
    except BaseException as error:
        beat.state, beat.error, beat.error_at = "failed", f"{type(error).__name__}: {error}", time.time()
        raise
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        _write(run_dir, beat, [])


async def _beat(run_dir: RunDir, waits: Waits, beat: Heartbeat) -> None:
    while True:
        _write(run_dir, beat, waits.lines())
        await asyncio.sleep(INTERVAL_S)


def _write(run_dir: RunDir, beat: Heartbeat, waits: list[str]) -> None:
    beat.written, beat.waits = time.time(), waits
    # A full disk must not end a run whose own files still fit, nor hide the error that it is ending with.
    with contextlib.suppress(OSError):
        run_dir.write_json("status.json", beat.as_json(), durable=False)
