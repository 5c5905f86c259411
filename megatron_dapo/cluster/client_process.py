"""The process that plays for the coordinator; `cluster.clients` has the other side."""

import asyncio
import os
import pickle
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from megatron_dapo.data.tokenizer import Decoder
from megatron_dapo.experience.episodes import Play, Rules
from megatron_dapo.experience.generator import Responder
from reward.config import RewardConfig
from reward.environment import Episode, Stepped
from reward.pool.pool import RewardPool
from rollout.config import RolloutConfig
from rollout.fleet.balancer import Balancer
from rollout.fleet.member import Member, State, Timing
from rollout.fleet.request_loop import Drawn, RequestLoop
from rollout.fleet.response import Response
from rollout.generation import Generation, GenerationRequest, ServedPart, ThinkingLimit
from rollout.server.engine import RemoteServer
from rollout.wire.client import SglangClient


class Stopped(Exception):
    """The play goes on at another time, or elsewhere. Stopped("http://...: no answer"): the server failed it."""


@dataclass(eq=False)
class _Away:
    """A play in its process, from its first order until it is over. To its `Responder` it is the fleet and the pool."""

    play: Play
    pool: RewardPool
    member: Member = field(init=False)
    """The server that is lent for it. Of this play alone: the state says what it met there."""
    loop: RequestLoop = field(init=False)
    stopped: bool = field(init=False)
    task: "asyncio.Task[None]" = field(init=False)
    response: Response | None = None
    """The turn that is not complete."""
    asked: "asyncio.Task[Stepped] | None" = None
    """The environment. It goes on for a play that is stopped meanwhile, and is not asked twice."""
    home: tuple[str, str, int] | None = None
    """URL and turn that were drawn last, and the weight version when the turn came there (`Response.home`)."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """A turn. Raises Stopped."""
        self.response = response = self.loop.begin(request)
        here = self.member.url, request.request_id
        if self.home is None or self.home[:2] != here:
            self.home = *here, self.member.weight_version
        response.home = self.member, self.home[2]
        while response.finish_reason is None:
            failure = await self.loop.attempt(response, self.member)
            if response.finish_reason is None and (failure is not None or self.stopped):
                raise Stopped(failure)
        self.response = None
        return response.generation(response.finish_reason)

    async def step(self, environment: str, episode: Episode) -> Stepped:
        """What it says to the newest turn. Raises Stopped."""
        if self.stopped:
            raise Stopped(None)
        self.asked = self.asked or asyncio.ensure_future(self.pool.step(environment, episode))
        stepped, self.asked = await asyncio.shield(self.asked), None
        return stepped

    def drawn(self) -> Generation | None:
        """What was drawn of the newest turn."""
        now = None if self.response is None else self.loop.now(self.response)
        return self.play.newest or now or self.play.request.begun


@dataclass(eq=False, repr=False)
class ClientProcess:
    """Body of the Ray actor."""

    rollout: RolloutConfig
    timing: Timing
    vocab_size: int
    api_key: str | None
    reward: RewardConfig
    decoder: Decoder
    rules: Rules
    thinking: ThinkingLimit | None
    folder: str
    """The coordinator's working directory, for the user's environments."""

    def __post_init__(self) -> None:
        os.chdir(self.folder)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # a connection for each running response
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._pool = RewardPool(self.reward)
        request_s, control_s, key = self.rollout.request_deadline_s, self.timing.control_deadline_s, self.api_key
        connect = partial(SglangClient, request_deadline_s=request_s, control_deadline_s=control_s, api_key=key)
        self._connect = cache(connect)
        self._loop = partial(RequestLoop, self.rollout, self.timing, vocab_size=self.vocab_size)
        self._away: dict[str, _Away] = {}

    async def play(self, order: bytes) -> bytes:
        """Goes on with a play until it is over or stopped. Returns what came of the server, an error that ended the
        play, and, at its end, how far it is."""
        key, place, url, server, fresh = pickle.loads(order)
        if fresh is not None:
            prompt, whole, carried, begun = fresh
            whole = replace(whole, sampling=replace(whole.sampling, thinking=self.thinking))
            play = Play(prompt, whole, self.rules if prompt.environment is not None else None)
            play.take(carried, begun)
            self._away[key] = _Away(play, self._pool)
        away, parts = self._away[key], list[ServedPart]()
        member = away.member = Member(RemoteServer(url), self._connect)
        member.info, member.weight_version, member.weight_label = server
        member.enter(State.READY)
        away.loop = self._loop(Balancer((member,), 1), observe=parts.append)
        away.stopped = False
        away.play.take(away.play.carried(), away.drawn())
        part: Any = away
        responder = Responder(fleet=part, pool=part, decoder=self.decoder)
        away.task = asyncio.ensure_future(responder.play(place, away.play))
        (error,) = await asyncio.gather(away.task, return_exceptions=True)
        over, progress, failure = error is None, None, error.args[0] if isinstance(error, Stopped) else None
        if isinstance(error, Stopped | asyncio.CancelledError):
            error = None
        else:
            progress = away.play.carried(), away.drawn()
            self._away.pop(key, None)
        drawn = Drawn(over=over, failure=failure, state=member.state, parts=tuple(parts))
        return pickle.dumps((drawn, error, progress), protocol=5)

    async def stop(self, url: str, lost: bool) -> None:
        """Ends what is drawn at a server, whose requests the coordinator ends too, unless it is lost."""
        for away in [each for each in self._away.values() if each.member.url == url]:
            away.stopped = True
            if lost:
                away.member.enter(State.DOWN, "it went down")
            if not away.member.drawing:
                away.task.cancel()

    async def drop(self, key: str) -> None:
        """Ends a play that nobody waits for."""
        if (away := self._away.pop(key, None)) is not None:
            away.task.cancel()
            await asyncio.wait([away.task])
            if away.asked is not None:
                away.asked.cancel()

    async def look(self, keys: Sequence[str]) -> bytes:
        """How far these plays are, of those that are here."""
        here = [(key, self._away[key]) for key in keys if key in self._away]
        return pickle.dumps([(key, away.play.carried(), away.drawn()) for key, away in here], protocol=5)
