"""The way of one request: a place at a server, one call to it, what came of that, and again until the response ends.

    generate:  Response -> [ Balancer.acquire -> _draw -> _attempt ] until the response is complete -> Generation
    _attempt:  _call (deadline, cancellation, abort) -> check -> one more part of the response

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollout.config import CONTEXT_RESERVE, RolloutConfig
from rollout.errors import RolloutError, ServerRefused, ServerUnavailable
from rollout.fleet.balancer import Balancer
from rollout.fleet.member import Member, State, Timing, end_all
from rollout.generation import FinishReason, Generation, GenerationRequest, ServedPart
from rollout.wire.reply import Reply, check_reply, join_segments, routing_of


@dataclass(slots=True)
class Response:
    """A response under way: what all attempts so far have drawn."""

    request: GenerationRequest
    parts: list[tuple[Reply, int]] = field(default_factory=list)
    """(tokens, weight version that drew them), in order."""
    streaming: tuple[Member, Sequence[Reply], int, float] | None = None
    """The server that draws the next part, what it has sent of it, its weight version, and since when (monotonic)."""
    routing: np.ndarray | None = None
    """uint8 [R, layers, k]: the experts of the first R tokens of prompt and response, as in `Generation`."""
    home: tuple[Member, int] | None = None
    """The server that drew last, and its weight version when the response came there: no keys and values that it left
    there are older."""
    _given: tuple[tuple[int, int], ...] | None = field(default=None, init=False)

    @classmethod
    def of(cls, request: GenerationRequest) -> "Response":
        """With what was drawn before."""
        begun = request.begun
        routing = begun.routing if begun is not None and request.routing is not None else None
        if begun is None or not begun.drawn:
            return cls(request, routing=routing)
        edges = np.flatnonzero(np.diff(begun.weight_versions)) + 1
        split = (np.split(array, edges) for array in (begun.drawn_ids, begun.log_probs, begun.weight_versions))
        parts = [
            (Reply(token_ids=ids, log_probs=log_probs, finish_reason=FinishReason.ABORT, weight_label=None), int(by[0]))
            for ids, log_probs, by in zip(*split, strict=True)
        ]
        parts[-1] = replace(parts[-1][0], finish_reason=begun.finish_reason), parts[-1][1]
        return cls(request, parts, routing=routing)

    def add(self, reply: Reply, version: int, routing: np.ndarray | None) -> None:
        """One more part, and the rows of routing that came with it: each token gets its row once. Where only these were
        asked for, the reply says nothing of how the response ended."""
        if self._end is None:
            self.parts.append((reply, version))
        if routing is not None:
            self.routing = routing if self.routing is None else np.concatenate([self.routing, routing])

    @property
    def routed(self) -> int:
        """R: tokens that have a row of routing."""
        return 0 if self.routing is None else len(self.routing)

    @property
    def drawn(self) -> np.ndarray:
        """int32 [T]: the tokens drawn so far."""
        return np.concatenate([np.zeros(0, np.int32), *(reply.token_ids for reply, _ in self.parts)])

    @property
    def tokens(self) -> int:
        """T."""
        return sum(reply.token_ids.size for reply, _ in self.parts)

    @property
    def given(self) -> tuple[tuple[int, int], ...]:
        """`Generation.given`, so far: the phrase that ends the thinking, behind `budget` drawn tokens. It follows from
        the drawn tokens alone, and is found out once."""
        thinking = self.request.sampling.thinking
        if thinking is None or self.tokens < thinking.budget:
            return ()
        if self._given is None:
            thought = self.drawn[: thinking.budget]
            stopped = thought.size > 0 and int(thought[-1]) in self.request.sampling.stop_token_ids
            self._given = () if stopped or thinking.ended(thought) else ((thinking.budget, len(thinking.end_ids)),)
        return self._given

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [C]: what stands behind the prompt so far."""
        ids, thinking = self.drawn, self.request.sampling.thinking
        return np.insert(ids, thinking.budget, thinking.end_ids) if thinking is not None and self.given else ids

    @property
    def prompt_ids(self) -> np.ndarray:
        """int32 [P + C]: the prompt, and that."""
        return np.concatenate([self.request.prompt_ids, self.token_ids])

    @property
    def tokens_left(self) -> int:
        return self.request.sampling.max_new_tokens - self.tokens

    @property
    def stretch(self) -> int:
        """Tokens to ask for: all that are left, or those up to the budget of thinking; 0 where only rows of routing are
        missing."""
        if self._end is not None:
            return 0
        thinking, drawn = self.request.sampling.thinking, self.tokens
        return thinking.budget - drawn if thinking is not None and drawn < thinking.budget else self.tokens_left

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None: it goes on, be it for rows of routing alone."""
        short = self.request.routing is not None and self.routed < self.prompt_ids.size - 1
        return None if short else self._end

    @property
    def _end(self) -> FinishReason | None:
        """Why no token is left to draw. An aborted part ends it too if it reached the limit, or drew a stop token
        last: a server that is told to abort between two tokens does not look for one. Nor does one whose limit was the
        budget of thinking, at its last token."""
        if not self.parts:
            return None
        reply, thinking = self.parts[-1][0], self.request.sampling.thinking
        at_budget = thinking is not None and self.tokens == thinking.budget and reply.token_ids.size > 0
        if reply.finish_reason is FinishReason.STOP or (reply.finish_reason is FinishReason.LENGTH and not at_budget):
            return reply.finish_reason
        if self.tokens_left <= 0:  # the limit counts before the stop token, as in a server
            return FinishReason.LENGTH
        stopped = reply.token_ids.size > 0 and int(reply.token_ids[-1]) in self.request.sampling.stop_token_ids
        return FinishReason.STOP if stopped else None

    def generation(self, finish_reason: FinishReason) -> Generation:
        """The complete response."""
        return Generation(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            log_probs=np.concatenate([reply.log_probs for reply, _ in self.parts]),
            weight_versions=np.concatenate([np.full(part.token_ids.size, by, np.int32) for part, by in self.parts]),
            finish_reason=finish_reason,
            given=self.given,
            routing=self.routing,
        )


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
    _drawn: int = field(default=0, init=False)
    """Tokens of all answers."""
    _aborts: set[asyncio.Future[Any]] = field(default_factory=set, init=False)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `RolloutFleet.generate`."""
        self._check_vocabulary(request)
        response = self._responses[request.request_id] = Response.of(request)
        try:
            return await self._until_complete(response)
        except asyncio.CancelledError:  # after an error `so_far` still tells of it
            self._responses.pop(request.request_id, None)
            raise

    def so_far(self, request_id: str) -> Generation | None:
        """See `RolloutFleet.so_far`."""
        response = self._responses.get(request_id)
        if response is None:
            return None
        now = Response(response.request, [*response.parts], routing=response.routing)
        now._given = response._given
        if response.streaming is not None:
            member, segments, version, _ = response.streaming
            streamed = self._streamed(member, segments, response)
            now.parts += [(streamed, version)] if streamed is not None else []
        return now.generation(now.finish_reason or FinishReason.ABORT) if now.parts else None

    async def _until_complete(self, response: Response) -> Generation:
        request, failures, failed = response.request, 0, None
        while response.finish_reason is None:
            priority, holdable = request.priority, request.holdable
            member = await self.balancer.acquire(request.group_id, priority, avoid=failed, holdable=holdable)
            try:
                failure = await self._draw(member, response)
            finally:
                self.balancer.release(member)
            failed = None
            if failure is not None and response.finish_reason is None:
                failures, failed = failures + 1, member
                await self._after_failure(request.request_id, failures, failure)
        self._responses.pop(request.request_id, None)
        return response.generation(response.finish_reason)

    def load(self) -> tuple[int, int, float]:
        """See `RolloutFleet.load`."""
        owed = [response.streaming for response in self._responses.values() if response.streaming is not None]
        streamed = sum(len(come) for _, come, *_ in owed) * self.config.stream_every
        now = time.monotonic()
        return self._drawn + streamed, len(owed), now - min((since for *_, since in owed), default=now)

    async def close(self) -> None:
        """Ends the aborts that are still being sent."""
        await end_all(tuple(self._aborts))

    async def _draw(self, member: Member, response: Response) -> str | None:
        """As `_attempt`, and again after each publish in which the response keeps its place."""
        while response.finish_reason is None and await member.passed():
            failure = await self._attempt(member, response)
            if failure is not None or member.gate.is_set():
                return failure
        return None

    async def _attempt(self, member: Member, response: Response) -> str | None:
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
            self._drawn += reply.token_ids.size
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
            self.observe(part)
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
        kept, routed = segments if streams else None, None if request.routing is None else response.routed
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
            raise ServerRefused(
                f"{member.url}: cut a response off at {reply.token_ids.size} tokens of {left}: its context or KV cache "
                "holds no more, and all longer responses would count as truncated; raise model.context_length, "
                "rollout.memory_fraction or rollout.kv_cache_tokens, or lower rollout.max_new_tokens"
            )
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
