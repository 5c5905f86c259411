"""Run a function on several gloo ranks, each its own process, with a deadline.

The processes are kept between calls (importing Megatron-Core costs seconds): a call gets idle workers, and a worker
that failed, or whose peer failed, is ended and replaced. Every call has its own rendezvous file, and what it leaves
initialised in torch.distributed or Megatron's parallel state is taken down after it.
"""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where a rank stands: first argument of the function that `run_ranks` runs."""

    rank: int
    world_size: int
    rendezvous: str
    """`file://...`, fresh for every call."""


class RankError(AssertionError):
    """A rank raised, died or missed the deadline; the message holds its rank and traceback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


_idle: list[_Worker] = []


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Results of `function(place, *args)` on ranks 0..n-1, in rank order.

    `function` stands at module level; arguments and results travel pickled. The first rank that raises has its
    traceback re-raised here as RankError and ends the others; so does the deadline, `timeout_s` seconds after the
    call.
    """
    deadline = time.monotonic() + timeout_s
    # Taken out of the pool: one call inside another would get other workers.
    workers = [_idle.pop() if _idle else _start() for _ in range(n)]
    try:
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            for rank, worker in enumerate(workers):
                place = RankPlace(rank=rank, world_size=n, rendezvous=f"file://{folder}/rendezvous")
                worker.pipe.send_bytes(pickle.dumps((function, place, args)))
            results = _collect(workers, deadline, timeout_s)
    except BaseException:
        for worker in workers:
            worker.end()
        raise
    _idle.extend(workers)
    return results


def end_workers() -> None:
    """End the idle workers; the test session calls this last."""
    while _idle:
        _idle.pop().end()


def _start() -> _Worker:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # spawned processes inherit it: they import the tests by name
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with _environment():
        process.start()
    theirs.close()
    return _Worker(process=process, pipe=ours)


@contextlib.contextmanager
def _environment():
    """A child reads OMP_NUM_THREADS when it starts, so it must stand in the parent's environment at that moment."""
    before = {key: os.environ.get(key) for key in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _collect(workers: list[_Worker], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(workers):
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} gave no result within {timeout_s:g} s")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                workers[rank].process.join(10)
                raise RankError(f"rank {rank} died, exit code {workers[rank].process.exitcode}") from None
            if not ok:
                raise RankError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(workers))]


def _serve(pipe: Connection) -> None:
    """The worker's life: one function after the other until the parent is gone."""
    import torch

    from megatron_dapo.actor.device import prepare

    torch.set_num_threads(1)
    prepare("cpu")  # before a test's function imports anything of Megatron
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, place, args = pickle.loads(message)
            answer = (True, function(place, *args))
            answer_bytes = pickle.dumps(answer)
        except Exception:
            answer_bytes = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer_bytes)
        _take_down()


def _take_down() -> None:
    """Leave nothing of one call for the next."""
    import torch

    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
