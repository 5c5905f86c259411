"""An asyncio event loop whose clock jumps to the next timer: hours of waiting are simulated in no time of their own.

Code that waits with asyncio alone (sleeps, timers, futures) runs in it unchanged and sees `loop.time()` in virtual
seconds. There is no I/O: nothing but what is simulated can wake a task.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeftError(RuntimeError):
    """Tasks wait, but nothing that could wake them will ever happen."""


class _Jump(selectors.SelectSelector):
    """Instead of waiting for I/O, lets the time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeftError("all tasks wait, and no timer is set")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at second 0."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in virtual time.

    Raises:
        NothingLeftError: `main` can never end.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
