"""The process that plays for the coordinator; `cluster.clients` has the other side."""

import asyncio
import os
import pickle
from dataclasses import dataclass, field, replace
from functools import cache, partial

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
from rollout.generation import Generation, GenerationRequest, ServedPart, ThinkingLimit
from rollout.server.engine import RemoteServer
from rollout.wire.client import SglangClient


class Stopped(Exception):
    """The play goes on at another time, or elsewhere. Stopped("http://...: no answer"): the server failed it."""


@dataclass(eq=False)
class _Away:
    """A play in its process, and the server that is lent for it."""

    play: Play
    member: Member
    """Its own: the state says what it met there."""
    loop: RequestLoop
    first: GenerationRequest
    """Of the turn that it goes on with."""
    since: int
    """Weight version with which that came to the server."""
    stopped: bool = False
    task: "asyncio.Task[None]" = field(init=False)

    async def generate(self, request: GenerationRequest) -> Generation:
        """A turn. Raises Stopped."""
        response = self.loop.begin(request)
        if request is self.first:
            response.home = self.member, self.since
        while response.finish_reason is None:
            failure = await self.loop.attempt(response, self.member)
            if response.finish_reason is None and (failure is not None or self.stopped):
                raise Stopped(failure)
        return response.generation(response.finish_reason)

    def so_far(self, request_id: str) -> Generation | None:
        """As of the fleet."""
        return self.loop.so_far(request_id)

    def drawn(self) -> Generation | None:
        """What was drawn of the newest turn."""
        request = self.play.request
        return self.so_far(request.request_id) or request.begun


class ClientProcess:
    """Body of the Ray actor."""

    def __init__(
        self,
        rollout: RolloutConfig,
        timing: Timing,
        vocab_size: int,
        api_key: str | None,
        reward: RewardConfig,
        decoder: Decoder,
        rules: Rules,
        thinking: ThinkingLimit | None,
        folder: str,
    ) -> None:
        """`folder`: the coordinator's working directory, for the user's environments."""
        os.chdir(folder)
        self._decoder, self._rules, self._thinking = decoder, rules, thinking
        self._pool = RewardPool(reward, judges=False)
        deadline_s, control_s = rollout.request_deadline_s, timing.control_deadline_s
        connect = partial(SglangClient, request_deadline_s=deadline_s, control_deadline_s=control_s, api_key=api_key)
        self._connect = cache(connect)
        self._loop = partial(RequestLoop, rollout, timing, vocab_size=vocab_size)
        self._away: dict[str, _Away] = {}
        self._asked: dict[str, asyncio.Task[Stepped]] = {}
        """Environments that are still asked for plays that were stopped."""

    async def play(self, order: bytes) -> bytes:
        """Goes on with a play until it is over or stopped; how far it is then. Raises as `Responder.play`."""
        key, place, prompt, whole, thinks, url, server, since, carried, begun = pickle.loads(order)
        thinking = self._thinking if thinks else None
        whole = replace(whole, sampling=replace(whole.sampling, thinking=thinking))
        play = Play(prompt, whole, self._rules if prompt.environment is not None else None)
        play.take(carried, begun)
        member, parts = Member(RemoteServer(url), self._connect), list[ServedPart]()
        member.info, member.weight_version, member.weight_label = server
        member.enter(State.READY)
        loop = self._loop(Balancer((member,), 1), observe=parts.append)
        away = self._away[key] = _Away(play, member, loop, play.request, since)
        responder = Responder(fleet=away, pool=self._pool, decoder=self._decoder)
        away.task = asyncio.ensure_future(responder.play(place, play, ask=partial(self._ask, key)))
        over, failure = False, None
        try:
            await away.task
            over = True
        except asyncio.CancelledError:
            pass
        except Stopped as stopped:
            (failure,) = stopped.args
        finally:
            del self._away[key]
        drawn = Drawn(over=over, failure=failure, state=member.state, parts=tuple(parts))
        return pickle.dumps((drawn, play.carried(), away.drawn()), protocol=5)

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
        if key in self._away:
            self._away[key].task.cancel()
            await asyncio.wait([self._away[key].task])
        if key in self._asked:
            self._asked.pop(key).cancel()

    async def look(self) -> bytes:
        """How far each play is."""
        plays = [(key, away.play.carried(), away.drawn()) for key, away in self._away.items()]
        return pickle.dumps(plays, protocol=5)

    async def _ask(self, key: str, environment: str, episode: Episode) -> Stepped:
        """What is asked for a play that is stopped meanwhile is not asked twice: the answer waits for the play."""
        if self._away[key].stopped:
            raise Stopped(None)
        asked = self._asked.pop(key, None) or asyncio.ensure_future(self._pool.step(environment, episode))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._asked[key] = asked
            raise
