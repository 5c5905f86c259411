"""Runs a job on several processes while a line on standard error tells how far it is and how long it will take: on a
terminal it is written over, in a log there is one every 5 s."""

import ctypes
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.rank_pool import RankPlace, RankPool

DEADLINE_S = 24 * 3600
"""Of one phase; a worker that fails or dies ends it at once."""

START_DEADLINE_S = 600

KEPT_BYTES = 2**27

_POLL_S = 0.2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Bytes done, by rank, in a file that all processes map."""

    file: str
    workers: int

    def add(self, place: RankPlace, count: int) -> None:
        """Called by rank `place` alone for its entry."""
        self._mapped()[place.rank] += count

    def total(self) -> int:
        return int(self._mapped().sum())

    def _mapped(self) -> np.ndarray:
        return np.memmap(self.file, dtype=np.int64, mode="r+", shape=(self.workers,))


class Progress:
    """Shows one phase; `show` may be called as often as wanted."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = self._written = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def show(self, done: int, total: int) -> None:
        """Write how much of `total` is done, and the time left at the rate so far."""
        now = time.monotonic()
        if now - self._written < (0.2 if self._terminal else 5.0):
            return
        self._written = now
        left = f", about {(now - self._start) * (total - done) / done:.0f} s left" if done else ""
        line = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB, {now - self._start:.0f} s{left}"
        self._print(line, end="" if self._terminal else "\n")

    def close(self, text: str) -> None:
        """The phase's last line."""
        self._print(f"{text}, {time.monotonic() - self._start:.0f} s", end="\n")

    def _print(self, text: str, end: str) -> None:
        line = f"{self._title} {text}"
        if self._terminal:
            line = "\r\x1b[2K" + line[: shutil.get_terminal_size().columns - 1]
        print(line, end=end, file=sys.stderr, flush=True)


def run_parts(
    pool: RankPool, function: Callable[..., Any], parts: list[Any], progress: Progress, total: int
) -> list[Any]:
    """`function(place, part, counter)` for each part in a process of its own; its answers in order.

    `total`: bytes that the parts count together in `counter`.
    """
    with tempfile.TemporaryDirectory() as folder:
        counter = Counter(file=str(Path(folder) / "bytes"), workers=len(parts))
        Path(counter.file).write_bytes(bytes(8 * len(parts)))
        finished = threading.Event()

        def show() -> None:
            while not finished.wait(_POLL_S):
                progress.show(counter.total(), total)

        watcher = threading.Thread(target=show, daemon=True)
        watcher.start()
        try:
            return pool.run(len(parts), part_of, function, parts, counter, timeout_s=DEADLINE_S)
        finally:
            finished.set()
            watcher.join()


def part_of(place: RankPlace, function: Callable[..., Any], parts: list[Any], counter: Counter) -> Any:
    """What a worker runs."""
    _keep_memory()
    return function(place, parts[place.rank], counter)


def _keep_memory() -> None:
    """Let the allocator reuse what a tensor leaves instead of giving it back: fresh pages cost more than the reading.

    Larger blocks than KEPT_BYTES it gives back, or their gaps would add up. Only GNU's C library has the call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(option, KEPT_BYTES)


def start_workers(pool: RankPool, workers: int) -> None:
    """Start the processes ahead, so that what follows is timed and foretold without their start."""
    progress = Progress("start")
    pool.run(workers, ready, timeout_s=START_DEADLINE_S)
    progress.close(f"{workers} processes")


def ready(place: RankPlace) -> None:
    """Import what the phases need."""
    import tools.conversion.directions
    import tools.conversion.verify  # noqa: F401
