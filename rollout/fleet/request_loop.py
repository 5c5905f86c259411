"""The way of one request: a place at a server, one call to it, what came of that, and again until the response ends.

    generate:  Response -> [ Balancer.acquire -> _draw -> attempt ] until the response is complete -> Generation
    attempt:   _call (deadline, cancellation, abort) -> check -> one more part of the response

An attempt ends in one of four ways:
  - complete: the reply ends the response.
  - interrupted: a publish or `hold` ended it. The response goes on with the weights of then; no server failed. Unless
    `rollout.on_publish` is restart, it keeps its place in a publish and goes on at the same server.
  - failed: the server gave no usable answer, or stopped early. What it streamed is kept, the rest is asked for at
    another server, and the failure counts towards `rollout.max_attempts`.
  - refused: the request is wrong, and the error goes to the caller.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from rollout.config import CONTEXT_RESERVE, RolloutConfig
from rollout.errors import RolloutError, ServerRefused, ServerUnavailable
from rollout.fleet.balancer import Balancer
from rollout.fleet.member import Member, State, Timing, end_all
from rollout.fleet.response import Response
from rollout.generation import FinishReason, Generation, GenerationRequest, ServedPart
from rollout.wire.reply import Reply, check_reply, join_segments, routing_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What came of a server that was lent. Drawn(over=False, failure="http://...: no answer", state=State.SUSPECT)"""

    over: bool
    """Whether all is drawn."""
    failure: str | None = None
    """Why the server did not do its part, or was told not to."""
    state: State = State.READY
    """What the failure says of the server."""
    parts: tuple[ServedPart, ...] = ()


Draw = Callable[[Member], Awaitable[Drawn]]


@dataclass(eq=False)
class RequestLoop:
    """Sends requests to the fleet's servers until each has its response."""

    config: RolloutConfig
    timing: Timing
    balancer: Balancer
    vocab_size: int
    observe: Callable[[ServedPart], None]
    _responses: dict[str, Response] = field(default_factory=dict, init=False)
    """Under way, by the id of the request."""
    _lent: dict[object, float] = field(default_factory=dict, init=False)
    """Since when (monotonic) another process draws what it was lent a place for."""
    _drawn: int = field(default=0, init=False)
    """Tokens of all answers."""
    _aborts: set[asyncio.Future[Any]] = field(default_factory=set, init=False)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `RolloutFleet.generate`."""
        response = self._responses[request.request_id] = self.begin(request)
        try:
            await self._until(lambda: response.finish_reason is not None, request, partial(self.attempt, response))
        except asyncio.CancelledError:  # after an error `so_far` still tells of it
            self._responses.pop(request.request_id, None)
            raise
        self._responses.pop(request.request_id, None)
        assert response.finish_reason is not None
        return response.generation(response.finish_reason)

    def begin(self, request: GenerationRequest) -> Response:
        """Raises ValueError: the request cannot be sent to a server."""
        self._check_vocabulary(request)
        return Response.of(request)

    def so_far(self, request_id: str) -> Generation | None:
        """See `RolloutFleet.so_far`."""
        response = self._responses.get(request_id)
        return None if response is None else self.now(response)

    def now(self, response: Response) -> Generation | None:
        """What was drawn of it until now; None: nothing."""
        now = Response(response.request, [*response.parts], routing=response.routing)
        now._given = response._given
        if response.streaming is not None:
            member, segments, version, _ = response.streaming
            streamed = self._streamed(member, segments, response)
            now.parts += [(streamed, version)] if streamed is not None else []
        return now.generation(now.finish_reason or FinishReason.ABORT) if now.parts else None

    async def _until(
        self, over: Callable[[], bool], request: GenerationRequest, attempt: Callable[[Member], Awaitable[str | None]]
    ) -> None:
        """Has a server `attempt` it, as the method of that name, again and again until it is over."""
        failures, failed = 0, None
        while not over():
            priority, holdable = request.priority, request.holdable
            member = await self.balancer.acquire(request.group_id, priority, avoid=failed, holdable=holdable)
            try:
                failure = await self._draw(member, over, attempt)
            finally:
                self.balancer.release(member)
            failed = None
            if failure is not None and not over():
                failures, failed = failures + 1, member
                await self._after_failure(request.request_id, failures, failure)

    async def lend(self, request: GenerationRequest, draw: Draw) -> None:
        """Has another process draw a response, or an episode turn by turn, with `attempt` at the server that it is
        lent.

        This one chooses the server, counts failures and interrupts. Until the other's answer is back it may draw, and
        no weights change at the server. So whatever ends the requests of a server first tells the other process to stop
        (`Member.stop_lent`): it begins nothing more there, ends what does not wait for the server, and the server's
        answers to the abort end the rest.
        """
        over = turned = False

        async def attempt(member: Member) -> str | None:
            nonlocal over, turned
            before, restarts = member.interruptions, member.restarts
            self._lent[attempt] = time.monotonic()
            member.drawing += 1
            try:
                drawn = await draw(member)
            finally:
                member.drawing -= 1
                del self._lent[attempt]
            over = drawn.over
            for part in drawn.parts:
                member.last_answer = time.monotonic()
                self._served(part)
                turned = turned or part.finish_reason is not FinishReason.ABORT
            # It cannot tell an interruption from a failure.
            interrupted = self._interrupted_since(member, before) and member.serving and member.engine.alive()
            if drawn.failure is None or interrupted:
                return None
            if drawn.state is not State.READY and member.serving and member.restarts == restarts:
                member.enter(drawn.state, drawn.failure)
            return drawn.failure

        def ended() -> bool:
            return over or turned

        while not over:
            turned = False  # `max_attempts` counts for each turn anew
            await self._until(ended, request, attempt)

    def load(self) -> tuple[int, int, float]:
        """See `RolloutFleet.load`."""
        owed = [response.streaming for response in self._responses.values() if response.streaming is not None]
        streamed = sum(len(come) for _, come, *_ in owed) * self.config.stream_every
        now, begun = time.monotonic(), [*(since for *_, since in owed), *self._lent.values()]
        return self._drawn + streamed, len(begun), now - min(begun, default=now)

    def _served(self, part: ServedPart) -> None:
        """Counts a server's answer."""
        self._drawn += part.tokens
        self.observe(part)

    async def close(self) -> None:
        """Ends the aborts that are still being sent."""
        await end_all(tuple(self._aborts))

    async def _draw(
        self, member: Member, over: Callable[[], bool], attempt: Callable[[Member], Awaitable[str | None]]
    ) -> str | None:
        """As `attempt`, and again after each publish in which the response keeps its place."""
        while not over() and await member.passed():
            failure = await attempt(member)
            if failure is not None or member.gate.is_set():
                return failure
        return None

    async def attempt(self, response: Response, member: Member) -> str | None:
        """Asks one server for the rest of the response. Returns why the server did not finish its part; None: it did,
        or it was interrupted."""
        request, prompt, left = response.request, response.prompt_ids, response.tokens_left
        version, before, start = member.weight_version, member.interruptions, time.time()
        if response.home is None or response.home[0] is not member:
            response.home = member, version
        segments: list[Reply] = []
        reply: Reply | None = None
        failure = None
        response.streaming = member, segments, version, time.monotonic()
        member.drawing += 1
        try:
            reply = await self._call(member, response, prompt, segments)
            member.last_answer = time.monotonic()
            if reply.finish_reason is FinishReason.ABORT and not self._interrupted_since(member, before):
                failure = f"{member.url} ended the response before its end"
                if self.config.deterministic:  # what goes on from a prefix is computed in another order
                    reply = None
        except ServerUnavailable as error:
            # SGLang answers 499 to what is aborted on its way to the scheduler.
            if not (self._interrupted_since(member, before) and member.serving and member.engine.alive()):
                failure = str(error)
                if member.state is State.READY:  # no new requests until the supervisor has probed it
                    member.enter(State.SUSPECT, failure)
            reply = self._streamed(member, segments, response)
        except ServerRefused:
            if response.stretch and (not response.parts or left > CONTEXT_RESERVE):
                raise
            if response.stretch:  # it fills the context: a response that goes on may not use the last tokens of it
                ids, log_probs = np.zeros(0, np.int32), np.zeros(0, np.float32)
                reply = Reply(token_ids=ids, log_probs=log_probs, finish_reason=FinishReason.LENGTH, weight_label=None)
            else:  # complete, but too long to be read once more for its rows: it is drawn anew
                response.parts, response.routing, response._given = [], None, None
        finally:
            member.drawing -= 1
            response.streaming = None
        if reply is not None:
            routing, reply = reply.routing, replace(reply, routing=None)
            response.add(reply, version, routing)
            part = ServedPart(
                request_id=request.request_id,
                url=member.url,
                start=start,
                end=time.time(),
                prompt_tokens=prompt.size,
                tokens=reply.token_ids.size,
                weight_version=version,
                finish_reason=reply.finish_reason,
                cached_tokens=reply.cached_tokens,
                retractions=reply.retractions,
            )
            self._served(part)
        return failure

    def _interrupted_since(self, member: Member, before: int) -> bool:
        """One that got its place just before an interruption begins within it, while the balancer is closed."""
        return member.interruptions != before or not (self.balancer.is_open and member.gate.is_set())

    async def _call(self, member: Member, response: Response, prompt: np.ndarray, segments: list[Reply]) -> Reply:
        """A checked answer of the server. Whoever stops waiting for it has the server abort it.

        Args:
            prompt: int32 [P + C], with what was drawn and given before.
            segments: filled with what the server streams.
        """
        assert member.info is not None
        rid, request = uuid.uuid4().hex, response.request
        sampling = replace(request.sampling, max_new_tokens=response.stretch)
        # Where seeds count, a server uses one fixed seed for all requests without: equal prompts, equal responses.
        seed = request.seed if member.info.deterministic else None
        # Deterministic responses are not streamed: what a server did not finish is drawn again.
        streams = self.config.stream_every > 0 and not self.config.deterministic and member.info.streams
        kept = segments if streams else None
        routed = None if request.routing is None else response.routed
        key = str(response.home[1]) if self.config.on_publish == "keep" and response.home is not None else None
        options: dict[str, Any] = {"seed": seed, "segments": kept, "routed_from": routed, "cache_key": key}
        asking = member.client.generate(rid, prompt, sampling, **options)
        # A server that is merely slow answers the abort with what it has.
        late = asyncio.get_running_loop().call_later(self.config.request_deadline_s, self._abort, member, rid)
        try:
            return self._checked(member, await member.call(asking), response)
        except (ServerUnavailable, asyncio.CancelledError):
            self._abort(member, rid)
            raise
        finally:
            late.cancel()

    def _streamed(self, member: Member, segments: Sequence[Reply], response: Response) -> Reply | None:
        """What a server has sent of a part, if that can be used."""
        with suppress(RolloutError):
            return self._checked(member, join_segments(segments), response) if segments else None
        return None

    def _abort(self, member: Member, rid: str) -> None:
        """In the background: without it a server notices only seconds later that nobody waits for an answer."""
        if member.serving:  # where it fails, the server is dead, and so is the request
            abort = asyncio.gather(member.client.abort(rid), return_exceptions=True)
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)

    def _checked(self, member: Member, reply: Reply, response: Response) -> Reply:
        """The reply, its routing in rows, if the response can go on or end with it.

        Raises:
            ServerUnavailable: the server has other weights than it was given, or its answer cannot be used.
            ServerRefused: the server has no room for the tokens that it was asked for.
        """
        asked, left = response.stretch, response.tokens_left
        if member.weight_label is not None and reply.weight_label not in (None, member.weight_label):
            problem = f"it serves weights {reply.weight_label!r}, not {member.weight_label!r}: restarted by others?"
            member.enter(State.DOWN, problem)
            raise ServerUnavailable(f"{member.url}: {problem}")
        try:
            check_reply(reply, asked=asked, vocab_size=self.vocab_size)
            request, tokens = response.request, response.prompt_ids.size + reply.token_ids.size
            if request.routing is not None:
                rows = routing_of(reply, request.routing, request.request_id, response.routed, tokens)
                reply = replace(reply, routing=rows)
        except ValueError as error:
            raise ServerUnavailable(f"{member.url}/generate: cannot use the answer: {error}") from None
        short = reply.finish_reason is FinishReason.LENGTH and reply.token_ids.size < asked
        if short and reply.token_ids.size < left - CONTEXT_RESERVE:
            remedy = "raise model.context_length, rollout.memory_fraction or rollout.kv_cache_tokens"
            why = "its context or KV cache holds no more, and all longer responses would count as truncated"
            cut = f"cut a response off at {reply.token_ids.size} tokens of {left}"
            raise ServerRefused(f"{member.url}: {cut}: {why}; {remedy}, or lower rollout.max_new_tokens")
        return reply

    def _check_vocabulary(self, request: GenerationRequest) -> None:
        if request.prompt_ids.size == 0:
            raise ValueError(f"request {request.request_id}: the prompt is empty; give at least one token")
        sampling = request.sampling
        others = [*sampling.stop_token_ids, *(sampling.logit_bias or ())]
        others += sampling.thinking.end_ids if sampling.thinking is not None else ()
        ids = np.append(request.prompt_ids, np.array(others, np.int64))
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if outside.size:
            problem = f"token id {outside[0]} is outside the vocabulary of {self.vocab_size}"
            raise ValueError(f"request {request.request_id}: {problem}: do tokenizer and model belong together?")

    async def _after_failure(self, request_id: str, failures: int, problem: str) -> None:
        """Gives up after `max_attempts`. The second attempt starts at once, since it goes to another server. Later ones
        wait; otherwise all would be used up within a second."""
        if failures >= self.config.max_attempts:
            tails = "\n".join(member.engine.log_tail() for member in self.balancer.members if not member.serving)
            raise RolloutError(
                f"request {request_id}: gave up after rollout.max_attempts = {failures} attempts; last words: {problem}"
                + (f"\n{tails}" if tails else "")
            )
        if failures > 1:
            await asyncio.sleep(self.timing.backoff_s(failures - 2))
