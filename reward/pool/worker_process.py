"""One worker process as the pool sees it: started, asked, killed. Its own program (`reward.pool.worker`), never a fork.

A fork would copy the locks of a parent that runs Ray and threads; `multiprocessing`'s spawn would import the parent's
main module. This starts in about 0.1 s and imports nothing but the verifiers.
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from reward.pool.messages import Channel, Order, Reply

START_LIMIT_S = 120.0
"""Wall-clock limit of the start of a process and of the imports that a verifier needs, on a loaded machine."""

_ONE_THREAD = {
    name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
}
_LOG_TAIL = 2000


def worker_environment() -> dict[str, str]:
    """Environment of a process that finds the same modules as this one and computes in one thread."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    return os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


class WorkerStartError(RuntimeError):
    """A worker did not come up; the message holds what it wrote to its standard error."""


class WorkerProcess:
    """A running worker. Used by one thread; `end` alone may be called from another."""

    def __init__(self, memory_mb: int, niceness: int) -> None:
        """Starts the process, `niceness` below this one's priority; `wait_ready` must follow.

        It dies with the thread that calls this.
        """
        ours, theirs = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        self._channel = Channel(ours)
        self.used = False
        """Whether it has been given work."""
        self.low_priority = False
        with theirs:
            settings = [theirs.fileno(), os.getpid(), memory_mb, niceness]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "reward.pool.worker", *map(str, settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                env=worker_environment(),
                start_new_session=True,  # Ctrl-C reaches a whole group; the run ends its workers itself
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Waits until the worker serves. Raises WorkerStartError; the process is gone then."""
        try:
            self._channel.receive_reply(START_LIMIT_S)
            self._log.close()  # a worker that is ready writes nowhere
        except (TimeoutError, EOFError, OSError) as error:
            why = f"not ready after {START_LIMIT_S:g} s" if isinstance(error, TimeoutError) else self.how_it_died()
            self.kill()
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LOG_TAIL))
            log = self._log.read().decode("utf-8", "replace").strip()
            self._log.close()
            raise WorkerStartError(f"reward worker {self.pid}: {why}; it wrote: {log or '(nothing)'}") from error

    def send(self, order: Order, timeout_s: float) -> None:
        """Sends an order. Raises TimeoutError, OSError."""
        self._channel.send_order(order, timeout_s)

    def receive(self, timeout_s: float) -> Reply:
        """Waits for a reply. Raises TimeoutError, EOFError, OSError, ValueError (it is no reply)."""
        return self._channel.receive_reply(timeout_s)

    def cpu_seconds(self) -> float:
        """CPU time that the process has used so far."""
        with open(f"/proc/{self._process.pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def has_answered(self, timeout_s: float) -> bool:
        """Waits until a reply has begun to arrive, or the connection broke; False if neither happened in time."""
        return self._channel.wait(timeout_s)

    def lower_priority(self) -> None:
        """Lets everything else on the machine go first. There is no way back: the pool replaces the process."""
        self.low_priority = True
        if self._process.poll() is None:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)

    def end(self) -> None:
        """Ends the process, whatever it is doing. From any thread: the one that waits for a reply sees it gone."""
        self._process.kill()

    def kill(self) -> None:
        """Ends the process, waits up to 10 s for it to be gone, and closes the connection."""
        self.end()
        self._process.wait(10.0)
        self._channel.close()

    def how_it_died(self) -> str:
        """`worker died (signal 11)`, for a process whose connection broke."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "worker closed its connection"
        return f"worker died (signal {-code})" if code < 0 else f"worker died (exit code {code})"
