"""Every wait has a name, an owner and a deadline (law 5).

Three more things end a wait before its answer: the deadline, the loss of a process that the answer needs, and, for
waits that may be given up, a request to stop.
"""

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_dapo.monitor.console import Count, duration

T = TypeVar("T")
HowFar = Callable[[], Count] | None
"""Says how far an answer is, if that is known. Called now and then; it must not block."""

LOOK_DEADLINE_S = 30.0
"""For each node to say what its trainer ranks do, once they have given no answer."""
LAST_WORD_S = 30.0
"""Seconds past the deadline of a blocking call after which the process is ended: such a call handles no signal."""


class Stalled(RuntimeError):
    """A deadline passed. The message says who waited for whom, and since when."""

    exit_code = 4


class StopRequested(Exception):
    """Someone asked the run to stop, and nothing would be lost by stopping here."""

    exit_code = 75


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    what: str
    owner: str
    """Who has to answer."""
    deadline_s: float
    since: float
    """time.monotonic() at its start."""
    count: HowFar = None

    def line(self) -> str:
        seconds = f"{time.monotonic() - self.since:.0f} of {self.deadline_s:g} s"
        far = f"; {self.count().text()}" if self.count else ""
        return f"{self.what}: waiting for {self.owner} for {seconds}{far}"


class Waits:
    """The waits of this process that are under way. Belongs to the event loop that it is made in."""

    def __init__(self, stop: "asyncio.Future[None] | None" = None) -> None:
        """`stop`: done when the run is asked to stop; None: nobody can ask."""
        self._open: list[Wait] = []
        self._lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._stop = stop or asyncio.get_running_loop().create_future()
        self.on_blocking: Callable[[], None] = lambda: None
        """Called before a blocking call, in which the event loop stands still."""

    def lose(self, error: Exception) -> None:
        """A process that the run needs is gone: every wait, open or later, ends with `error`."""
        if not self._lost.done():
            self._lost.set_result(error)

    @contextmanager
    def register(self, what: str, owner: str, deadline_s: float, count: HowFar = None) -> Iterator[Wait]:
        wait = Wait(what=what, owner=owner, deadline_s=deadline_s, since=time.monotonic(), count=count)
        self._open.append(wait)
        try:
            yield wait
        finally:
            self._open.remove(wait)

    async def wait_for(
        self,
        what: str,
        owner: str,
        deadline_s: float,
        answer: Awaitable[T],
        *,
        stoppable: bool = False,
        count: HowFar = None,
    ) -> T:
        """The answer. What asked for it is cancelled, and has ended, when anything else is raised.

        Args:
            stoppable: whether a stop request ends this wait.

        Raises:
            Stalled: `deadline_s` passed; with every open wait of the process.
            StopRequested: as `stoppable` says.
            Exception: the answer's own, or the one given to `lose`.
        """
        asked = asyncio.ensure_future(answer)
        endings: list[asyncio.Future[Any]] = [asked, self._lost, *([self._stop] if stoppable else [])]
        with self.register(what, owner, deadline_s, count) as wait:
            try:
                await asyncio.wait(endings, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    return asked.result()
                if self._lost.done():
                    raise self._lost.result()
                if stoppable and self._stop.done():
                    raise StopRequested
                raise self._stalled(wait)
            finally:
                if not asked.done():
                    asked.cancel()
                    await asyncio.gather(asked, return_exceptions=True)

    @contextmanager
    def blocking(
        self, what: str, owner: str, deadline_s: float, *, last_word_s: float = LAST_WORD_S, count: HowFar = None
    ) -> Iterator[None]:
        """Around a blocking library call: the whole process waits in the body. In the main thread only.

        Where the call lets no signal through, the process ends `last_word_s` after the deadline, with every thread's
        stack on stderr.

        Raises:
            Stalled: `deadline_s` passed.
        """
        with self.register(what, owner, deadline_s, count) as wait:
            self.on_blocking()

            def on_alarm(*_: object) -> None:
                raise self._stalled(wait)

            def end() -> None:
                try:
                    print(self._stalled(wait), file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(all_threads=True)
                finally:  # also where nobody reads stderr any more
                    os._exit(Stalled.exit_code)

            last = threading.Timer(deadline_s + last_word_s, end)
            last.daemon = True
            last.start()
            before = signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, deadline_s)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                last.cancel()

    def _stalled(self, wait: Wait) -> Stalled:
        table = "\n".join(f"  {line}" for line in self.lines())
        stacks = "\n".join(f"  {line}" for line in _stacks())
        said = f"{wait.owner} gave no answer within {wait.deadline_s:g} s"
        return Stalled(f"{wait.what}: {said}; open waits:\n{table}\nwhere tasks stand:\n{stacks}")

    def lines(self) -> list[str]:
        """Open waits, oldest first; several of one name as their oldest, with how many they are."""
        first, names = {wait.what: wait for wait in reversed(self._open)}, Counter(wait.what for wait in self._open)
        return [f"{n} x " * (n > 1) + first[name].line() for name, n in names.items()]

    def counts(self) -> dict[str, Count]:
        """How far each open wait is of which that is known, by name."""
        return {wait.what: wait.count() for wait in reversed(self._open) if wait.count}


async def ready_after(report: Callable[[str], None], what: str, starting: Awaitable[T]) -> T:
    """What `starting` returns; `report` is told that `what` is ready, and after how long."""
    began = time.monotonic()
    answer = await starting
    report(f"  {what} ready after {duration(time.monotonic() - began)}")
    return answer


def _stacks() -> list[str]:
    """Where each task of this process waits, equal places counted once."""
    loop = asyncio._get_running_loop()  # none in the thread that has the last word
    frames = [frame for task in (asyncio.all_tasks(loop) if loop else ()) for frame in task.get_stack()[-1:]]
    codes = [(frame.f_code, frame.f_lineno) for frame in frames]
    places = Counter(f"{code.co_qualname} ({code.co_filename}:{line})" for code, line in codes)
    return [f"{count} x {place}" for place, count in places.most_common(10)]
