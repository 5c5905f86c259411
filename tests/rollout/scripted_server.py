"""Stand-in servers that play a `Script` at a modelled speed, compressed in time, and can freeze or die."""

import asyncio
import heapq
import random
from dataclasses import dataclass
from itertools import count

import msgspec
import orjson
from aiohttp import web

from rollout.wire.reply import Finish, Segment, frame
from tests.rollout.answering import Answer
from tests.rollout.script import END, FIRST_TAG, PROMPT_TOKENS, TAGS, Script, prompt_of
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
        self.turns = 1
        """Turns of an episode; more only where no response is interrupted."""
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

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        self.requests += 1
        ids, wanted = asked["input_ids"], asked["sampling_params"]["max_new_tokens"]
        prompt, drawn = prompt_of(ids), len(ids) - PROMPT_TOKENS
        prefill = drawn + (0 if prompt in self._cached else PROMPT_TOKENS)
        self.prefills += prompt not in self._cached
        self._cached.add(prompt)
        tag = ids[PROMPT_TOKENS] - FIRST_TAG if drawn else self._random.randrange(TAGS)
        length, _ = self.script.response(prompt, tag)
        first, last = 0, length
        if self.turns > 1:  # each turn draws its share of the script; what an environment gave is not in it
            turn = ids[PROMPT_TOKENS:].count(END)
            first, last = (length * place // self.turns for place in (turn, turn + 1))
        self.running[asked["rid"]] = abort = Abort()
        self.most_running = max(self.most_running, len(self.running))
        answer = await self._begin(request, asked)
        streamed, interval = answer.streamed, self.stream_interval
        at, end = (drawn, min(length, drawn + wanted)) if self.turns == 1 else (first, min(last, first + wanted))
        drawn = at
        try:
            while True:
                # A segment ends with the first token, the next ones after so many more, as a real server's.
                most = min(end, at + (1 if at == drawn else interval or end)) if streamed else end
                sent, at = at, at + await self._decoding.draw(most - at, prefill if at == drawn else 0, abort.renewed())
                if self.frozen:
                    await asyncio.sleep(60)
                self.tokens_drawn += at - sent
                if not streamed or at == end or abort.is_set():
                    break
                await answer.part(self._content(answer, prompt, tag, sent, at, None))
        finally:
            self.running.pop(asked["rid"], None)
        reason = _reason(at == last, at == drawn + wanted)
        return await answer.end(self._content(answer, prompt, tag, sent, at, reason, ends=last < length))

    def _content(
        self, answer: Answer, prompt: int, tag: int, start: int, stop: int, reason: Finish | None, ends: bool = False
    ) -> bytes:
        """`ends`: the last token ends a turn that others follow."""
        if answer.packed:
            ids, log_probs = self.script.arrays(prompt, tag, start, stop)
            if ends:
                ids[-1] = END
            drawn = {"token_ids": ids.tobytes(), "log_probs": log_probs.tobytes()}
            return frame(Segment(**drawn, finish=reason, weight_version=self.label))
        entries, words = self.script.body(prompt, tag, start, stop)
        body = (
            b'{"output_ids":[%b],"meta_info":{"finish_reason":%b,"weight_version":"%b","output_token_logprobs":[%b]}}'
        )
        return body % (words, msgspec.json.encode(reason), self.label.encode(), entries)


class Abort(asyncio.Event):
    """Set by others to end a request; whatever it is drawing then ends too."""

    def __init__(self) -> None:
        super().__init__()
        self._piece = asyncio.Event()

    def renewed(self) -> asyncio.Event:
        """Set when the tokens drawn next are there, or by an abort."""
        self._piece = asyncio.Event()
        if self.is_set():
            self._piece.set()
        return self._piece

    def set(self) -> None:
        super().set()
        self._piece.set()


def _reason(stops: bool, is_cut_off: bool) -> Finish:
    if is_cut_off:
        return Finish(type="length")
    return Finish(type="stop", matched=END) if stops else Finish(type="abort", message="Abort")
