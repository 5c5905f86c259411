"""One worker process as the pool sees it: started, asked, killed. Its own program (`reward.pool.worker`), never a fork.

A fork would copy the locks of a parent that runs Ray and threads; `multiprocessing`'s spawn would import the parent's
main module. This starts in about 0.1 s and imports nothing but the verifiers.
"""

import asyncio
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from reward.code import READS
from reward.config import RewardConfig
from reward.environment import Step, Stepped
from reward.pool.messages import FRAME_LIMIT, HEADER, READY, Job, Reply, Result, decode_reply, needed
from reward.verdict import Deferred, PoolError

START_LIMIT_S = 120.0
"""Wall-clock limit of the start of a process and of the imports that a verifier needs, on a loaded machine."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_LOG_TAIL, _PART_BYTES = 2000, 1 << 20


def worker_environment(config: RewardConfig) -> dict[str, str]:
    """Environment of a process that finds the same modules as this one, the user's in the working directory last, and
    computes in one thread."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path), str(Path.cwd())]
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), READS: os.pathsep.join(config.code_reads)}
    return os.environ | dict.fromkeys(_THREADS, "1") | own


class WorkerLost(Exception):
    """A worker gave no results and must be replaced. `again`: something else than its last work may be to blame."""

    def __init__(self, reason: str, seconds: float, again: bool) -> None:
        super().__init__(reason)
        self.seconds, self.again = seconds, again


class WorkerProcess:
    """A running worker, for one task of one event loop."""

    def __init__(self, config: RewardConfig, niceness: int) -> None:
        """Starts the process, `niceness` below this one's priority; `wait_ready` must follow.

        It dies with the thread that calls this.
        """
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        self._used = False
        self._imported = set[str]()
        """What slow jobs needed before, as `needed`."""
        with theirs:
            settings = [theirs.fileno(), os.getpid(), config.memory_mb, niceness]
            command = [sys.executable, "-m", "reward.pool.worker", *map(str, settings)]
            # Ctrl-C reaches a whole group; the run ends its workers itself.
            options: dict[str, Any] = {"stderr": self._log, "start_new_session": True, "pass_fds": (theirs.fileno(),)}
            options |= dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
            self._process = subprocess.Popen(command, env=worker_environment(config), **options)
        self.pid = self._process.pid

    async def wait_ready(self) -> None:
        """Waits until the worker serves. Raises PoolError: it did not come up; the message holds what it wrote to its
        standard error."""
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await self._receive(0)
        except (EOFError, OSError) as error:
            why = f"not ready after {START_LIMIT_S:g} s" if isinstance(error, TimeoutError) else await self._death()
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _LOG_TAIL))
            log = self._log.read().decode("utf-8", "replace").strip()
            raise PoolError(f"reward worker {self.pid}: {why}; it wrote: {log or '(nothing)'}") from error
        finally:
            self._log.close()  # a worker that is ready writes to /dev/null

    async def judge(self, jobs: Sequence[Job], *, slow: bool, limit_s: float) -> Sequence[Result]:
        """Their results, in at most `limit_s` of wall-clock time, imports not counted.

        Args:
            slow: they are for a slow verifier, an environment or algebra, and may need imports; else for fast ones.

        Raises:
            WorkerLost: there are none, or one that took all memory.
        """
        again, self._used, start = self._used, True, time.monotonic()
        needs = {needed(job) for job in jobs} - self._imported if slow else set[str]()
        number, stepping = secrets.randbits(64), isinstance(jobs[0], Step)
        try:
            async with asyncio.timeout(START_LIMIT_S if needs else limit_s) as limit:
                content = pickle.dumps((jobs, bool(needs)), protocol=5)
                await asyncio.get_running_loop().sock_sendall(self._socket, HEADER.pack(len(content), number) + content)
                if needs:
                    if await self._receive(number) is not READY:
                        raise ValueError("an unexpected reply: the next one would belong to another request")
                    limit.reschedule(asyncio.get_running_loop().time() + limit_s)
                    self._imported |= needs
                results = await self._receive(number)
            if results is READY or len(results) != len(jobs):
                raise ValueError("a reply that is no result")
            if any(isinstance(each, Stepped) is not stepping for each in results):
                raise ValueError("a reply to another question")
            if slow and any(not isinstance(each, Deferred) and each.error == "memory" for each in results):
                raise MemoryError
            return results
        except MemoryError:
            reason = "memory"
        except TimeoutError:
            reason, again = "timeout", False
        except ValueError as error:  # the worker still runs: there is no exit code to report
            reason = f"worker: {error}"[:200]
        except (EOFError, OSError):  # somebody else may have killed it, as the kernel does where memory is short
            reason, again = await self._death(), True
        raise WorkerLost(reason, time.monotonic() - start, again)

    async def _receive(self, number: int) -> Reply:
        """The next reply, to the order of this number. Raises EOFError, OSError (the worker is gone), ValueError (it is
        no reply, or to another order)."""
        length, answered = HEADER.unpack(await self._read(HEADER.size))
        if answered != number:
            raise ValueError("a reply to another order")
        if length > FRAME_LIMIT:
            raise EOFError(f"frame of {length} bytes; the limit is {FRAME_LIMIT}")
        return decode_reply(await self._read(length))

    async def _read(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            part = await asyncio.get_running_loop().sock_recv(self._socket, min(size - len(received), _PART_BYTES))
            if not part:
                raise EOFError("the other end is closed")
            received += part
        return bytes(received)

    async def _death(self) -> str:
        """`worker died (signal 11)`, for a process whose connection broke."""
        try:
            code = await asyncio.to_thread(self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            return "worker closed its connection"
        return f"worker died (signal {-code})" if code < 0 else f"worker died (exit code {code})"

    async def end(self) -> None:
        """Kills the process, whatever it is doing, with all that it started, and waits up to 10 s for it to be gone."""
        with suppress(ProcessLookupError):  # it leads a session of its own, in which its children may outlive it
            os.killpg(self.pid, signal.SIGKILL)
        self._socket.close()
        await asyncio.to_thread(self._process.wait, 10.0)
