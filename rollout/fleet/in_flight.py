"""What the servers are drawing, so that a wait for the last of many responses says what it waits for."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollout.wire.reply import Reply


@dataclass(eq=False, slots=True)
class _Asked:
    request_id: str
    url: str
    segments: Sequence[Reply]
    since: float = field(default_factory=time.monotonic)


class InFlight:
    """The responses that servers owe, over the whole fleet."""

    def __init__(self) -> None:
        self._asked: dict[_Asked, None] = {}
        """In the order in which they were asked for."""
        self._begun = 0

    @contextmanager
    def asked(self, request_id: str, url: str, segments: Sequence[Reply]) -> Iterator[None]:
        """Inside, the server at `url` owes a response.

        Args:
            segments: filled with what it passes on meanwhile.
        """
        entry = _Asked(request_id, url, segments)
        self._asked[entry] = None
        self._begun += 1
        try:
            yield
        finally:
            del self._asked[entry]

    async def watch(self, every_s: float, deadline_s: float, report: Callable[[str], None]) -> None:
        """Reports the response that is owed longest, every `every_s` seconds, once no server has sent anything for a
        tenth of `deadline_s`: a segment, or a whole response, takes its time. One server among many that is silent is
        not told of: the fleet's probes see to it.

        Args:
            deadline_s: of one request.
        """
        signs, since = self._signs(), time.monotonic()
        while True:
            await asyncio.sleep(every_s)
            before, signs, now = signs, self._signs(), time.monotonic()
            if signs != before or not self._asked:
                since = now
            elif now - since >= deadline_s / 10:
                report(f"no server has sent anything for {now - since:.0f} s; {self._line(now, deadline_s)}")

    def _line(self, now: float, deadline_s: float) -> str:
        oldest = next(iter(self._asked))
        tokens = sum(segment.token_ids.size for segment in oldest.segments)
        return (
            f"responses owed: {len(self._asked)}, the longest {oldest.request_id} by {oldest.url}, {tokens} tokens in "
            f"{now - oldest.since:.0f} s (asked for again after rollout.request_deadline_s = {deadline_s:g} s)"
        )

    def _signs(self) -> tuple[int, int, int]:
        """Changes with every request, answer and segment."""
        return self._begun, len(self._asked), sum(len(each.segments) for each in self._asked)
