"""Servers as a model: how long a response takes when others run beside it. Nothing is computed but time.

All responses that an engine runs draw one token in each decode step. A step takes

    fixed_s + context_s x (tokens of context that run)        seconds,

the time to read the weights and the KV cache once. With speculative decoding a step checks `drafted` tokens of each
response, all but the first at the price of a prompt's, and keeps `accepted` of them on average. Reading a prompt, or a
response that comes back after an interruption, stops the engine for `prefill_s` a token.
"""

import asyncio
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

_HAIR = 1e-6
"""Of a decode step: what rounding may leave of the last one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Seconds of one engine. The defaults are what `megatron-dapo plan` computes for a server of
    examples/qwen2.5_32b/h100_128.yaml: Qwen2.5-32B on four H100s, by data sheet and assumed efficiencies."""

    fixed_s: float = 0.0154
    context_s: float = 3.0e-8
    prefill_s: float = 3.3e-5
    drafted: int = 1
    accepted: float = 1.0

    def seconds(self, steps: float, running: int, context: float) -> float:
        """Until each of `running` responses has `steps` tokens more, which lengthen the context."""
        return steps * (self._step_s(running) + self.context_s * (context + running * steps / 2)) / self.accepted

    def steps(self, seconds: float, running: int, context: float) -> float:
        """Undoes `seconds`."""
        first, slope = self._step_s(running) + self.context_s * context, self.context_s * running
        seconds *= self.accepted
        if slope * seconds < 1e-12:
            return seconds / first
        return (math.sqrt(first * first + 2 * slope * seconds) - first) / slope

    def _step_s(self, running: int) -> float:
        return self.fixed_s + self.prefill_s * running * (self.drafted - 1)


@dataclass(slots=True, eq=False)
class Response:
    """One response on its way."""

    length: int
    prompt_tokens: int
    done: Callable[["Response"], None]
    """Called at its last token."""
    engine: "Engine | None" = None
    drawn: int = 0
    """Tokens, as of the last time that it was looked at."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(weight version, tokens), in order."""
    start: float = 0.0
    """Decode steps of its engine when it was at token 0."""

    def look(self, drawn: int, version: int) -> None:
        """Write down that all tokens up to `drawn` that are not yet counted were drawn by `version`."""
        if drawn > self.drawn:
            self.versions.append((version, drawn - self.drawn))
            self.drawn = drawn


class Engine:
    """One server's running responses."""

    def __init__(self, speed: Speed, slots: int, free: Callable[["Engine"], None]) -> None:
        """`free` is called when places have become free."""
        self.slots = slots
        self.running: dict[Response, None] = {}
        """A set in the order of arrival."""
        self._speed, self._free = speed, free
        self._loop = asyncio.get_running_loop()
        self._steps = 0.0
        self._context = 0.0
        self._since = self._loop.time()
        self._due: list[tuple[float, int, Response]] = []
        self._number = count()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, response: Response) -> None:
        """Begin with its prompt and what it has already. The timer must be set by `set_timer` afterwards."""
        self._advance()
        self.stall(self._speed.prefill_s * (response.prompt_tokens + response.drawn))
        response.engine, response.start = self, self._steps - response.drawn
        self.running[response] = None
        self._context += response.prompt_tokens + response.drawn
        heapq.heappush(self._due, (response.start + response.length, next(self._number), response))

    def remove(self, response: Response, version: int) -> None:
        """End it before its last token."""
        self._advance()
        self._look(response, version)
        self._leave(response)
        self.set_timer()

    def interrupt(self, version: int, pause_s: float) -> None:
        """New weights: nothing runs for `pause_s`, then every context is read anew. Up to now `version` drew."""
        self._advance()
        for response in self.running:
            self._look(response, version)
        self.stall(pause_s + self._speed.prefill_s * self._context)
        self.set_timer()

    def stall(self, seconds: float) -> None:
        """No token for a while."""
        self._since = max(self._since, self._loop.time()) + seconds

    def set_timer(self) -> None:
        """To the end of the response that ends first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._due[0][2].engine is not self:
            heapq.heappop(self._due)
        if self._due:
            left = max(0.0, self._due[0][0] - self._steps)
            when = self._since + self._speed.seconds(left, len(self.running), self._context)
            self._timer = self._loop.call_at(when, self._ring)

    def drawn(self, response: Response) -> int:
        """Tokens of a running response up to now."""
        self._advance()
        return min(response.length, int(self._steps - response.start + _HAIR))

    def _look(self, response: Response, version: int) -> None:
        response.look(min(response.length, int(self._steps - response.start + _HAIR)), version)

    def _advance(self) -> None:
        seconds = self._loop.time() - self._since
        if seconds <= 0:
            return
        self._since += seconds
        if self.running:
            steps = self._speed.steps(seconds, len(self.running), self._context)
            self._steps += steps
            self._context += steps * len(self.running)

    def _leave(self, response: Response) -> None:
        del self.running[response]
        self._context -= response.prompt_tokens + self._steps - response.start
        response.engine = None

    def _ring(self) -> None:
        self._timer = None
        self._advance()
        ended = []
        while self._due and (self._due[0][2].engine is not self or self._due[0][0] <= self._steps + _HAIR):
            _, _, response = heapq.heappop(self._due)
            if response.engine is self:
                self._leave(response)
                ended.append(response)
        for response in ended:
            response.done(response)
        self._free(self)
        self.set_timer()
