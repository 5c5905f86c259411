"""The servers as one: responses to requests, weights to all, whatever single servers do meanwhile."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rollout.config import RolloutConfig
from rollout.errors import RolloutError, ServerRefused, ServerUnavailable, ServerUnfit
from rollout.fleet.balancer import Balancer, Member, State
from rollout.fleet.deadlines import Timing
from rollout.fleet.gpu_memory import Occupation
from rollout.fleet.in_flight import InFlight
from rollout.fleet.response import KEPT_BACK, Drawn, check_usable, ended, join, nothing_more, served
from rollout.fleet.supervision import Supervisor
from rollout.generation import FinishReason, Generation, GenerationRequest, ServedPart
from rollout.server.engine import Engine
from rollout.weights.checksums import Checksums
from rollout.weights.weight_update import OnDisk, Publisher, PublishReport, WeightStream
from rollout.wire.client import ServerInfo
from rollout.wire.reply import Reply
from rollout.wire.stream import join_segments


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """One server now: EngineStatus(url="http://127.0.0.1:30000", state="ready", reason="", in_flight=64,
    weight_version=3, restarts=0, seconds=812.5)"""

    url: str
    state: str
    """starting, ready, suspect (a request failed; probed before it gets new ones) or down."""
    reason: str
    in_flight: int
    weight_version: int
    restarts: int
    seconds: float
    """In this state."""


class RolloutFleet:
    """Answers requests with the help of one or more SGLang servers, and keeps these alive.

    All methods belong to one event loop, whose thread lives as long as the fleet.
    """

    def __init__(
        self,
        config: RolloutConfig,
        engines: Sequence[Engine],
        *,
        vocab_size: int,
        report: Callable[[str], None],
        timing: Timing | None = None,
        api_key: str | None = None,
        observe: Callable[[ServedPart], None] | None = None,
    ) -> None:
        """
        Args:
            vocab_size: rows of the model's embedding.
            report: gets a line whenever a server fails or comes back.
            api_key: what the servers ask for; None: nothing.
            observe: gets every answer of a server to a request.
        """
        if not engines:
            raise ValueError("a fleet needs at least one engine; see rollout.servers and rollout.urls")
        self.config = config
        self.engines = tuple(engines)
        self.vocab_size = vocab_size
        self.report = report
        self.timing = timing or Timing()
        self._api_key = api_key
        self._observe = observe
        self._members: tuple[Member, ...] = ()
        self._background: set[asyncio.Task[None]] = set()
        self._in_flight = InFlight()
        self._balancer: Balancer
        self._publisher: Publisher
        self._occupation: Occupation
        self._supervisor: Supervisor | None = None

    async def start(self, deadline_s: float) -> None:
        """Starts the engines and returns when every one answers; of ten or more, one in ten may come later.

        A server that is restarted later has `deadline_s` too.

        Raises:
            ServerStartError: names each server that is not ready, or ended twice, with the tail of its log. All are
                ended then. `ServerUnfit`: one can never be used.
        """
        config, timing = self.config, self.timing
        self._members = tuple(
            Member(engine, config.request_deadline_s, timing, self._api_key) for engine in self.engines
        )
        self._balancer = Balancer(self._members, config.max_running_requests)
        self._publisher = Publisher(self._members, self._balancer, timing, sync_deadline_s=config.sync_deadline_s)
        self._occupation = Occupation(self._members, self._balancer, timing)
        supervisor = Supervisor(
            self._members,
            self._balancer,
            self._publisher,
            self._occupation,
            timing=timing,
            start_deadline_s=deadline_s,
            fleet_deadline_s=config.fleet_deadline_s,
            report=self.report,
        )
        self._supervisor = supervisor
        try:
            await supervisor.start_all(deadline_s, self._check_fit)
        except Exception:
            await self.close()
            raise
        supervisor.start()
        self._in_background(self._in_flight.watch(timing.silence_s, config.request_deadline_s, self.report))

    def _check_fit(self, member: Member) -> None:
        assert member.info is not None
        if self.config.deterministic and not member.info.deterministic:
            raise ServerUnfit(
                f"{member.url}: rollout.deterministic is set, but this server runs without "
                "--enable-deterministic-inference and would ignore the seeds"
            )
        if member.info.altered:
            raise ServerUnfit(
                f"{member.url}: it runs with {member.info.altered}, so that its weights are not those it is given and "
                "no publish could be verified; start it without"
            )

    async def generate(self, request: GenerationRequest) -> Generation:
        """One response. Waits for a free place at a server, and survives the loss of servers and publishes.

        A publish interrupts the response; it goes on from the tokens it has, so each token has one weight version.
        After the loss of its server it goes on elsewhere, from what that one had passed on (`rollout.stream_every`).

        Raises:
            ValueError: a token id outside the vocabulary, which would end a server.
            ServerRefused: the server calls the request wrong, for example longer than its context.
            RolloutError: `max_attempts` servers failed on it; with the last one's words.
            FleetLost: no server for `fleet_deadline_s`.
        """
        self._check(request)
        parts: list[tuple[Reply, int]] = []
        attempts = 0
        failed: Member | None = None
        while True:
            drawn = await self._one_part(request, parts, failed)
            reply, failed = drawn.reply, None
            if reply is not None:
                parts.append((reply, drawn.version))
                left = request.sampling.max_new_tokens - sum(part.token_ids.size for part, _ in parts)
                if reply.finish_reason is not FinishReason.ABORT or left <= 0 or ended(request.sampling, reply):
                    return join(request, parts)
            if not drawn.interrupted:
                attempts, failed = attempts + 1, drawn.member
                self._count(request.request_id, attempts, drawn.problem)
                await self._pause(attempts)

    async def _one_part(
        self, request: GenerationRequest, parts: list[tuple[Reply, int]], avoid: Member | None
    ) -> Drawn:
        """What a server draws after `parts`; `avoid`: not this one, if there is another."""
        prompt = np.concatenate([request.prompt_ids, *(part.token_ids for part, _ in parts)])
        left = request.sampling.max_new_tokens - (prompt.size - request.prompt_ids.size)
        sampling = replace(request.sampling, max_new_tokens=left)
        member = await self._balancer.acquire(request.group_id, request.priority, avoid)
        # A server that heeds seeds takes the same one for all requests without: equal prompts, equal responses.
        seed = request.seed if member.info is not None and member.info.deterministic else None
        rid, version, publishes = uuid.uuid4().hex, member.weight_version, self._publisher.interruptions
        start = time.time()
        segments: list[Reply] = []
        reply: Reply | None
        problem, interrupted = f"{member.url} ended the response before its end", False
        try:
            parted = segments if self._streams(member) else None
            ask = partial(member.client.generate, rid, prompt, sampling, seed=seed, segments=parted)
            with self._in_flight.asked(request.request_id, member.url, segments):
                reply = await member.call(self._draw(member, rid, ask))
            self._check_reply(member, reply, left)
            member.answered = time.monotonic()
            interrupted = self._publisher.interruptions > publishes
        except ServerUnavailable as error:
            if member.state is State.READY:
                member.enter(State.SUSPECT, str(error))
            self._abort(member, rid)
            reply, problem = self._passed_on(member, segments, left), str(error)
        except ServerRefused:
            if not parts or left > KEPT_BACK:
                raise
            reply = nothing_more()  # the end of the context, which a response that goes on may not touch
        except asyncio.CancelledError:
            self._abort(member, rid)
            raise
        finally:
            self._balancer.release(member)
        if self._observe is not None and reply is not None:
            self._observe(served(request, member.url, prompt, reply, version, start))
        return Drawn(reply, version, interrupted, member, problem)

    def _streams(self, member: Member) -> bool:
        """Whether what a server draws is to be passed on before its end. Not where the same tokens are asked for to the
        bit: those that go on from a prefix are computed in another order than those that were drawn at one go."""
        wanted = self.config.stream_every > 0 and not self.config.deterministic
        return wanted and member.info is not None and member.info.streams

    def _passed_on(self, member: Member, segments: list[Reply], asked: int) -> Reply | None:
        """What a server that failed had sent of a response, if it can be used."""
        if not segments:
            return None
        reply = join_segments(segments)
        try:
            self._check_reply(member, reply, asked)
        except RolloutError:
            return None
        return reply if reply.token_ids.size else None

    async def _draw(self, member: Member, rid: str, ask: Callable[[], Coroutine[Any, Any, Reply]]) -> Reply:
        """At the deadline the response is ended, and a server that is merely slow answers with what it has."""
        answer = asyncio.ensure_future(ask())
        try:
            await asyncio.wait({answer}, timeout=self.config.request_deadline_s)
            if not answer.done():
                self._abort(member, rid)
            return await answer
        finally:
            answer.cancel()

    async def score(self, prompt_ids: np.ndarray, response_ids: np.ndarray) -> np.ndarray:
        """The engine's log-probs of a given response at temperature 1, to compare with the trainer's.

        Args:
            prompt_ids: int32 [P], P >= 1.
            response_ids: int32 [T].

        Returns:
            float32 [T].

        Raises:
            As `generate`.
        """
        token_ids = np.concatenate([prompt_ids, response_ids]).astype(np.int32)
        if prompt_ids.size == 0 or token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            raise ValueError(f"score: needs a prompt, and token ids in 0 .. {self.vocab_size - 1}")
        attempts = 0
        while True:
            member = await self._balancer.acquire(uuid.uuid4().hex)
            publishes = self._publisher.interruptions
            try:
                call = member.client.score(uuid.uuid4().hex, token_ids, prompt_ids.size)
                return await member.call(call)
            except ServerUnavailable as error:
                if self._publisher.interruptions == publishes:
                    attempts += 1
                    if member.state is State.READY:
                        member.enter(State.SUSPECT, str(error))
                    self._count("score", attempts, str(error))
            finally:
                self._balancer.release(member)
            await self._pause(attempts)

    async def publish(
        self, folder: Path, weight_version: int, checksums: Mapping[ServerInfo, Checksums] | None = None
    ) -> PublishReport:
        """Gives every server the weights in `folder` and returns when the checksum of every tensor is as computed here.

        No request starts meanwhile; running ones are interrupted and go on afterwards. A server that fails is
        restarted and gets the weights before it serves again; at least one must serve on return.

        Args:
            folder: Hugging Face layout (config.json, .safetensors), which the servers can read at the same path. It
                must stay until the next publish: servers that restart load it.
            weight_version: what `Generation.weight_versions` says from now on.
            checksums: those of the trainer, by kind of server (`kinds`); they are computed from the folder for kinds
                that are not there.

        Raises:
            WeightMismatch: a server holds other weights; names the tensors.
            ServerRefused: a server cannot load the folder.
            FileNotFoundError, ValueError: the folder is incomplete, or the model's checksums are not known.
            FleetLost: no server within `fleet_deadline_s`.
        """
        weights = OnDisk(folder=folder, checksums=checksums or {})
        return await self._publisher.publish(weights, weight_version, self.config.fleet_deadline_s)

    async def publish_stream(self, stream: WeightStream, weight_version: int) -> PublishReport:
        """The same for weights that the trainer sends from its memory. The servers are paused before it begins.

        A server that is restarted, or that the sending did not reach, reads them from a folder that the trainer writes
        for it.

        Raises:
            As `publish`, and what `stream` raises.
        """
        return await self._publisher.publish_stream(stream, weight_version, self.config.fleet_deadline_s)

    @property
    def kinds(self) -> tuple[ServerInfo, ...]:
        """What the servers say of themselves, each kind once."""
        return tuple(dict.fromkeys(member.info for member in self._members if member.info is not None))

    async def release_memory(self) -> tuple[float | None, ...]:
        """Every server leaves its accelerators' memory; requests wait until `resume_memory`. GB that each gave back, by
        its own account. A server that cannot (None) is ended, and restarted when the memory is the servers' again.

        Raises:
            RolloutError: a request is in flight.
        """
        return await self._occupation.release()

    async def resume_memory(self) -> None:
        """Servers take back what they left, weights included, and serve."""
        await self._occupation.resume()

    def status(self) -> list[EngineStatus]:
        """Every server as it is now, in the order of `engines`."""
        now = time.monotonic()
        return [
            EngineStatus(
                url=member.url,
                state=member.state,
                reason=member.reason,
                in_flight=member.in_flight,
                weight_version=member.weight_version,
                restarts=member.restarts,
                seconds=now - member.since,
            )
            for member in self._members
        ]

    async def close(self) -> None:
        """Ends the servers that this fleet started, and every wait for one. May be called twice."""
        if self._supervisor is not None:
            await self._supervisor.close()
            self._supervisor = None
            self._balancer.end(RolloutError("the fleet was closed"))
            for member in self._members:
                member.enter(State.DOWN, "the fleet was closed")
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*(member.forget_client() for member in self._members))
        closed = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for result in closed:  # once all have had their turn
            if isinstance(result, BaseException):
                raise result

    def _check(self, request: GenerationRequest) -> None:
        bias = request.sampling.logit_bias or {}
        largest = max(int(request.prompt_ids.max()), *request.sampling.stop_token_ids, *bias, 0)
        if largest >= self.vocab_size:
            raise ValueError(
                f"request {request.request_id}: token id {largest} is outside the vocabulary of {self.vocab_size}; "
                "a server would end on it. Are tokenizer and model of one kind?"
            )

    def _check_reply(self, member: Member, reply: Reply, asked: int) -> None:
        if member.weight_label is not None and reply.weight_label not in (None, member.weight_label):
            problem = f"it serves weights {reply.weight_label!r}, not {member.weight_label!r}: restarted by others?"
            member.enter(State.DOWN, problem)
            raise ServerUnavailable(f"{member.url}: {problem}")
        check_usable(reply, asked, self.vocab_size, member.url)

    async def _pause(self, attempts: int) -> None:
        """Before another attempt. The first one elsewhere need not wait; a server that is up and fails at once would
        otherwise use up all attempts within a second."""
        if attempts > 1:
            await asyncio.sleep(min(self.timing.first_backoff_s * 2 ** (attempts - 2), self.timing.longest_backoff_s))

    def _count(self, request_id: str, attempts: int, words: str) -> None:
        if attempts >= self.config.max_attempts:
            tails = "\n".join(member.engine.log_tail() for member in self._members if not member.serving)
            raise RolloutError(
                f"request {request_id}: gave up after rollout.max_attempts = {attempts} attempts; last words: {words}"
                + (f"\n{tails}" if tails else "")
            )

    def _abort(self, member: Member, rid: str) -> None:
        """In the background: a server notices only seconds later that nobody waits for an answer."""
        if not member.serving:
            return

        async def abort() -> None:
            try:
                await member.client.abort(rid)
            except (ServerUnavailable, ServerRefused):
                return  # it is dead then, and so is the request

        self._in_background(abort())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
