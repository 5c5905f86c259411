"""Stand-in servers that play a `Script` at a modelled speed, compressed in time, and can freeze or die."""

import asyncio
import heapq
import random
from dataclasses import dataclass
from itertools import count

import orjson
from aiohttp import web

from tests.rollout.script import FIRST_TAG, PROMPT_TOKENS, TAGS, Script, prompt_of
from tests.rollout.standin import StandIn


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How long a forward pass takes: one token for each of b running responses in `fixed_s` + `each_s` x b seconds.

    The prompt of a group that the server has not seen costs all that run `prefill_s` a token.
    """

    fixed_s: float = 0.008
    each_s: float = 0.00004
    prefill_s: float = 0.00002
    compress: float = 1.0
    """Modelled seconds in one real second."""
    slowness: float = 1.0

    def step_s(self, running: int) -> float:
        """Real seconds of a forward pass."""
        return self.slowness * (self.fixed_s + self.each_s * running) / self.compress


class Decoding:
    """The running responses of one server. All draw a token in each pass, so one counter of passes serves all."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self._passes = 0.0
        self._since = 0.0
        self._due: list[tuple[float, int, asyncio.Event]] = []
        self._running: dict[int, float] = {}
        self._number = count()
        self._timer: asyncio.TimerHandle | None = None

    async def draw(self, tokens: int, prefill: int, ended: asyncio.Event) -> int:
        """Returns when `tokens` are drawn, or when `ended` is set by others; the tokens drawn until then."""
        self._advance()
        self._since += self.speed.slowness * self.speed.prefill_s * prefill / self.speed.compress
        number, start = next(self._number), self._passes
        self._running[number] = start
        heapq.heappush(self._due, (start + tokens, number, ended))
        self._set_timer()
        try:
            await ended.wait()
            self._advance()
            return min(tokens, int(self._passes - start + 1e-6))
        finally:
            del self._running[number]
            self._set_timer()

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if now > self._since:
            if self._running:
                self._passes += (now - self._since) / self.speed.step_s(len(self._running))
            self._since = now
        while self._due and (self._due[0][1] not in self._running or self._due[0][0] <= self._passes + 1e-9):
            heapq.heappop(self._due)[2].set()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._due and self._running:
            left = max(0.0, self._due[0][0] - self._passes) * self.speed.step_s(len(self._running))
            self._timer = asyncio.get_running_loop().call_at(self._since + left + 1e-4, self._ring)

    def _ring(self) -> None:
        self._advance()
        self._set_timer()


class ScriptedServer(StandIn):
    """A stand-in that plays a script, can be frozen as by SIGSTOP, and counts what it did."""

    def __init__(self, script: Script, speed: Speed, seed: int) -> None:
        super().__init__()
        self.script, self.speed = script, speed
        self.frozen = False
        self.tokens_drawn = 0
        self.requests = 0
        self.prefills = 0
        """Requests whose prompt was not in the cache."""
        self._random = random.Random(seed)

    async def start(self) -> None:
        self.frozen = False
        self.running = {}
        self._decoding, self._cached = Decoding(self.speed), set[int]()
        await super().start()

    async def _health(self, request: web.Request) -> web.Response:
        if self.frozen:
            await asyncio.sleep(60)
        return await super()._health(request)

    async def _info(self, request: web.Request) -> web.Response:
        if self.frozen:
            await asyncio.sleep(60)
        return await super()._info(request)

    async def _generate(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        self.requests += 1
        ids, wanted = asked["input_ids"], asked["sampling_params"]["max_new_tokens"]
        prompt, drawn = prompt_of(ids), len(ids) - PROMPT_TOKENS
        prefill = drawn + (0 if prompt in self._cached else PROMPT_TOKENS)
        self.prefills += prompt not in self._cached
        self._cached.add(prompt)
        tag = ids[PROMPT_TOKENS] - FIRST_TAG if drawn else self._random.randrange(TAGS)
        length, _ = self.script.response(prompt, tag)
        self.running[asked["rid"]] = ended = asyncio.Event()
        self.most_running = max(self.most_running, len(self.running))
        try:
            new = await self._decoding.draw(min(wanted, length - drawn), prefill, ended)
        finally:
            self.running.pop(asked["rid"], None)
        if self.frozen:
            await asyncio.sleep(60)
        self.tokens_drawn += new
        return self._answer(prompt, tag, drawn, drawn + new, wanted)

    def _answer(self, prompt: int, tag: int, start: int, stop: int, wanted: int) -> web.Response:
        length, _ = self.script.response(prompt, tag)
        reason = b'{"type":"abort","message":"Abort"}'
        if stop == length:
            reason = b'{"type":"stop","matched":2}'
        if stop - start == wanted:
            reason = b'{"type":"length","length":%d}' % wanted
        entries, words = self.script.body(prompt, tag, start, stop)
        body = (
            b'{"output_ids":[%b],"meta_info":{"finish_reason":%b,"weight_version":"%b","output_token_logprobs":[%b]}}'
        )
        content = body % (words, reason, self.label.encode(), entries)
        return web.Response(body=content, content_type="application/json")
