"""Runs a function on several ranks of one machine, each its own process, with a deadline; without Ray.

The processes are kept between calls (importing Megatron-Core costs seconds); a call that fails ends all of them, and
the next one starts new ones. Every call has its own rendezvous file, and what it leaves initialised in
torch.distributed or Megatron's parallel state is taken down after it.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

STACK_LINES = 12
"""Innermost lines of a hanging rank's stack that an error shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where a rank stands: first argument of the function that `RankPool.run` runs."""

    rank: int
    world_size: int
    rendezvous: str
    """`file://...`, fresh for every call."""


class RankError(RuntimeError):
    """A rank raised or died; the message holds its number and traceback or exit code."""

    exit_code = 6


class RankTimeout(RankError):
    """The deadline passed; the message says which ranks gave no result, and where they stand."""

    exit_code = 4


_Worker = tuple[multiprocessing.process.BaseProcess, Connection]
"""A process, and this one's end of the pipe to it."""


class RankPool(contextlib.ExitStack):
    """Worker processes of one device type, one call at a time; `close` (or leaving `with`) ends them. They also end
    with this process."""

    context: multiprocessing.context.SpawnContext = multiprocessing.get_context("spawn")

    def __init__(self, device: Literal["cpu", "cuda"] = "cpu") -> None:
        super().__init__()
        self._device = device
        self._workers: list[_Worker] = []
        """By rank; on CUDA a rank has the GPU of its number."""
        self._calls = 0
        self._folder = self.enter_context(tempfile.TemporaryDirectory(prefix="ranks-"))
        self.callback(self._end_workers)

    def run(self, n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """Results of `function(place, *args)` on ranks 0..n-1, in rank order.

        `function` stands at module level; arguments and results travel pickled. The first rank that fails ends the
        others: they would wait for it in vain.

        Raises:
            RankError: a rank raised or died.
            RankTimeout: not all have answered `timeout_s` seconds after the call.
        """
        deadline = time.monotonic() + timeout_s
        self._calls += 1
        rendezvous = f"file://{self._folder}/rendezvous-{self._calls}"
        try:
            while len(self._workers) < n:
                self._workers.append(self._start(len(self._workers)))
            for rank, (_, pipe) in enumerate(self._workers[:n]):
                place = RankPlace(rank=rank, world_size=n, rendezvous=rendezvous)
                with contextlib.suppress(BrokenPipeError):  # a dead worker is found, and named, below
                    pipe.send_bytes(pickle.dumps((function, place, args)))
            return self._collect(n, deadline, timeout_s)
        except BaseException:
            self._end_workers()
            raise

    def _end_workers(self) -> None:
        while self._workers:
            process, pipe = self._workers.pop()
            process.kill()
            process.join(10)
            pipe.close()

    def _start(self, rank: int) -> _Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self._device, rank, self._folder), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _collect(self, n: int, deadline: float, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < n:
            waiting = {self._workers[rank][1]: rank for rank in range(n) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = list(waiting.values())
                stacks = "\n".join(f"rank {rank} stands at\n{self._stack(rank)}" for rank in late)
                raise RankTimeout(f"ranks {late} gave no result within {timeout_s:g} s\n{stacks}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self._workers[rank][0]
                    process.join(10)
                    raise RankError(f"rank {rank} died, exit code {process.exitcode}") from None
                if not ok:
                    raise RankError(f"rank {rank} raised:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(n)]

    def _stack(self, rank: int) -> str:
        """The innermost lines of a late rank's Python stack, as far as it still answers signals."""
        pid = self._workers[rank][0].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)
        file = Path(self._folder, f"stack-{pid}")
        lines = file.read_text().splitlines()[1:] if file.exists() else []
        return "\n".join(lines[:STACK_LINES]) or "its start, before the function was called"


def _serve(pipe: Connection, device: Literal["cpu", "cuda"], rank: int, folder: str) -> None:
    """The worker's life: one function after the other until the parent is gone."""
    # Before torch is imported, which reads them.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"LOCAL_RANK": str(rank)}
    warnings.simplefilter("ignore")
    # The file stays open as long as the process: the handler writes to its descriptor.
    stack_file = open(f"{folder}/stack-{os.getpid()}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
    # An interrupt from the keyboard goes to the whole group: the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from megatron_dapo.actor.device import prepare

    torch.set_num_threads(1)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            prepare(device)  # before a function imports anything of Megatron
            function, place, args = pickle.loads(message)
            answer = pickle.dumps((True, function(place, *args)))
        except Exception:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)
        from megatron_dapo.actor.device import process_groups  # it imports Megatron

        process_groups.shutdown()  # nothing of one call is left for the next


def _end_with_parent() -> None:
    """A killed parent cannot end its workers, and one that waits in a collective would not see the closed pipe."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
