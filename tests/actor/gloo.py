"""The tests' rank processes: one pool for a file of tests, of forks that begin with Megatron-Core imported."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import fork_server
from tools.rank_pool import RankError, RankPlace, RankPool, RankTimeout

__all__ = [
    "ForkedRanks",
    "RankError",
    "RankPlace",
    "RankTimeout",
    "end_workers",
    "errors_of",
    "run_ranks",
    "shared_pool",
]

ROOT = Path(__file__).parents[2]


class ForkedRanks(RankPool):
    """Importing Megatron-Core costs a rank 4 seconds of CPU."""

    context = fork_server.CONTEXT

    def run(self, n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        fork_server.start()
        return super().run(n, function, *args, timeout_s=timeout_s)


_pool: RankPool | None = None
_calls = 0
MOST_CALLS = 10
"""Of one pool's workers: an actor's wrapper and its hooks on gradients hold each other through C++, and with them the
threads of all its process groups."""


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """`RankPool.run` over gloo, for functions of the tests' own modules."""
    return shared_pool().run(n, function, *args, timeout_s=timeout_s)


def shared_pool() -> RankPool:
    """For what takes a pool. Nobody closes it."""
    global _pool, _calls
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # spawned processes inherit it: they import the tests by name
    _calls += 1
    if _calls % MOST_CALLS == 0:
        end_workers()
    _pool = _pool or ForkedRanks()
    return _pool


def errors_of(n: int, function: Callable[..., Any], *args: Any) -> list[str]:
    """Each rank's traceback, "" where it did not raise. An error that left the function would end the processes."""
    return run_ranks(n, _traceback, function, args)


def _traceback(place: RankPlace, function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    try:
        function(place, *args)
    except Exception:
        return traceback.format_exc()
    return ""


def end_workers() -> None:
    """End the idle workers; whoever runs ranks afterwards gets new ones."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None
