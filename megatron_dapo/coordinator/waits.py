"""Every wait has a name, an owner and a deadline (law 5)."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


class Stalled(RuntimeError):
    """A deadline passed. The message says who waited for whom, and since when."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    what: str
    owner: str
    """Who has to answer."""
    deadline_s: float
    since: float
    """time.monotonic() at its start."""

    def line(self) -> str:
        return f"{self.what}: waiting for {self.owner} for {time.monotonic() - self.since:.0f} of {self.deadline_s:g} s"


@dataclass
class Waits:
    """The waits of this process that are under way."""

    _open: dict[int, Wait] = field(default_factory=dict)
    _count: int = 0

    @contextmanager
    def register(self, what: str, owner: str, deadline_s: float) -> Iterator[None]:
        self._count += 1
        number = self._count
        self._open[number] = Wait(what=what, owner=owner, deadline_s=deadline_s, since=time.monotonic())
        try:
            yield
        finally:
            del self._open[number]

    async def wait_for(self, what: str, owner: str, deadline_s: float, answer: Awaitable[T]) -> T:
        """The answer, or Stalled with every open wait of the process when `deadline_s` passes."""
        with self.register(what, owner, deadline_s):
            deadline = asyncio.timeout(deadline_s)
            try:
                async with deadline:
                    return await answer
            except TimeoutError:
                if not deadline.expired():  # the part's own time-out, not this wait's
                    raise
                table = "\n".join(f"  {line}" for line in self.lines())
                stacks = "\n".join(f"  {line}" for line in _stacks())
                raise Stalled(
                    f"{what}: {owner} gave no answer within {deadline_s:g} s; open waits:\n{table}\n"
                    f"where tasks stand:\n{stacks}"
                ) from None

    def lines(self) -> list[str]:
        """Open waits, oldest first."""
        return [wait.line() for wait in sorted(self._open.values(), key=lambda wait: wait.since)]


def _stacks() -> list[str]:
    """Where each task of this process waits, equal places counted once."""
    places: Counter[str] = Counter()
    for task in asyncio.all_tasks():
        frames = task.get_stack()
        if frames:
            code = frames[-1].f_code
            places[f"{code.co_qualname} ({code.co_filename}:{frames[-1].f_lineno})"] += 1
    return [f"{count} x {place}" for place, count in places.most_common(10)]
