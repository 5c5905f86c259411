"""Processes that talk to servers and environments for the coordinator (`rollout.client_processes`), so that its CPU
does not: Ray actors on its node.

    Clients.play --an order: how far the play is, a server that is lent for it--> ClientProcess: turn after turn there
                 <--how far it is: over, the server failed, or its requests were ended--

The coordinator keeps all that plays share: which server, publishes, attempts (`rollout.fleet.lease`). A process that is
lost costs what its plays have drawn since the last look at them: each goes on from there, as after a lost server.
"""

import asyncio
import itertools
import os
import pickle
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_dapo.cluster.trainer import in_words
from megatron_dapo.data.tokenizer import Decoder
from megatron_dapo.experience.episodes import Play, Rules, drawn_turns, turn_of
from megatron_dapo.experience.generator import complete, play_turns
from reward.config import RewardConfig
from reward.environment import Episode, Stepped
from reward.pool.pool import RewardPool
from rollout.config import RolloutConfig
from rollout.fleet.balancer import Balancer
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.lease import Drawn, Lease
from rollout.fleet.member import Member, State, Timing
from rollout.fleet.request_loop import RequestLoop
from rollout.fleet.response import Response
from rollout.generation import Generation, GenerationRequest, ServedPart, ThinkingLimit
from rollout.server.engine import RemoteServer
from rollout.server.server_command import read_key
from rollout.wire.client import SglangClient

CALLS = 1_000_000
"""Of a process at a time: each play is one."""
PING_S, SILENT_S = 5.0, 120.0
"""Between two questions to a process, and for its answer, its start too; past that another one takes its place."""
LOOK_S = 10.0
"""For how far its plays are; past that what was known before stands."""
END_S = 10.0
"""For a play to end that nobody waits for any more."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a process needs besides what the fleet knows."""

    reward: RewardConfig
    decoder: Decoder
    rules: Rules
    thinking: ThinkingLimit | None
    key_file: Path | None
    """Of the servers' API key."""

    def shared(self, processes: int) -> RewardConfig:
        """For the environments of one of so many."""
        remote = self.reward.remote_environment
        remote = replace(remote, connections=max(1, remote.connections // processes))
        workers = max(1, self.reward.environment_workers // processes)
        return replace(self.reward, environment_workers=workers, remote_environment=remote)


class Stopped(Exception):
    """The play goes on at another time, or elsewhere."""


@dataclass(eq=False)
class _Away:
    """A play in its process."""

    number: int
    play: Play
    lease: Lease
    member: Member
    loop: RequestLoop
    since: int | None
    """As in `Drawn`."""
    response: Response | None = None
    """The turn that is at the server."""
    begun: Generation | None = None
    """What was drawn of it, once it has been cancelled."""
    failure: str | None = None
    stopped: bool = False
    task: "asyncio.Task[None]" = field(init=False)

    def drawn(self) -> Generation | None:
        """What was drawn of the turn that is not complete."""
        now = None if self.response is None else self.loop.now(self.response)
        return self.begun or now or self.play.request.begun


class ClientProcess:
    """Body of the Ray actor."""

    def __init__(
        self,
        setup: Setup,
        rollout: RolloutConfig,
        timing: Timing,
        vocab_size: int,
        folder: str,
        paths: Sequence[str],
    ) -> None:
        """`folder`, `paths`: the coordinator's working directory and `sys.path`, for the user's environments."""
        os.chdir(folder)
        sys.path += [path for path in paths if path not in sys.path]
        self._setup = setup
        self._pool = RewardPool(setup.shared(rollout.client_processes), judges=False)
        key, control_s = None if setup.key_file is None else read_key(setup.key_file), timing.control_deadline_s
        deadline_s = rollout.request_deadline_s
        self._connect = partial(SglangClient, request_deadline_s=deadline_s, control_deadline_s=control_s, api_key=key)
        self._loop = partial(RequestLoop, rollout, timing, Balancer((), 1), vocab_size)
        self._members: dict[str, Member] = {}
        self._away: dict[int, _Away] = {}
        self._asked: dict[int, asyncio.Task[Stepped]] = {}
        """Environments that are still asked for plays that were stopped, by their numbers."""

    async def play(self, order: bytes) -> bytes:
        """Goes on with a play until it is over or stopped; how far it is then. Raises as `play_turns`, `attempt`."""
        number, place, lease, prompt, whole, thinks, carried, begun = pickle.loads(order)
        if thinks:
            whole = replace(whole, sampling=replace(whole.sampling, thinking=self._setup.thinking))
        play = Play(prompt, whole)
        play.rules = self._setup.rules if prompt.environment is not None else None
        play.take(carried, begun)
        if play.before is not None:
            turns = zip(play.earlier, drawn_turns(play.before), strict=False)
            play.said = [turn_of(turn, ids) for turn, ids in turns]
        parts: list[ServedPart] = []
        member = self._member(lease)
        away = self._away[number] = _Away(number, play, lease, member, self._loop(parts.append), lease.since)
        turn, ask = partial(self._turn, away), partial(self._ask, away)
        away.task = asyncio.ensure_future(play_turns(place, play, turn, ask, self._setup.decoder))
        over = False
        try:
            await away.task
            over = True
        except (Stopped, asyncio.CancelledError):
            pass
        finally:
            del self._away[number]
        if away.response is not None and away.response.home is not None:
            away.since = away.response.home[1]
        drawn = Drawn(over=over, failure=away.failure, state=member.state, since=away.since, parts=tuple(parts))
        member.enter(State.READY)  # whether it serves, the coordinator finds out
        return pickle.dumps((drawn, play.carried(), away.drawn()), protocol=5)

    async def stop(self, url: str, lost: bool) -> None:
        """Ends what is drawn at a server, whose requests the coordinator ends too, unless it is lost."""
        if url in self._members:
            self._members[url].interruptions += 1
        for away in [each for each in self._away.values() if each.lease.url == url]:
            if lost:
                away.failure = f"{url}: it went down"
            away.stopped = True
            if lost or away.response is None:
                self._cancel(away)

    async def drop(self, number: int) -> None:
        """Ends a play that nobody waits for."""
        if number in self._away:
            self._cancel(self._away[number])
            await asyncio.wait([self._away[number].task])
        if number in self._asked:
            self._asked.pop(number).cancel()

    async def look(self) -> bytes:
        """How far each play is."""
        plays = [(number, away.play.carried(), away.drawn()) for number, away in self._away.items()]
        return pickle.dumps(plays, protocol=5)

    def _cancel(self, away: _Away) -> None:
        away.begun = away.drawn()
        away.task.cancel()

    def _member(self, lease: Lease) -> Member:
        member = self._members.get(lease.url)
        if member is None:
            member = self._members[lease.url] = Member(RemoteServer(lease.url), self._connect)
            member.enter(State.READY)
        member.info, member.weight_version, member.weight_label = lease.info, lease.weight_version, lease.weight_label
        return member

    async def _turn(self, away: _Away, place: str, request: GenerationRequest) -> Generation:
        if away.play.newest is not None:  # it is complete: its environment has not answered
            return away.play.newest
        if away.stopped:
            raise Stopped
        response = away.loop.begin(request)
        if away.since is not None:
            response.home = away.member, away.since
        away.response, away.since = response, None
        while response.finish_reason is None:
            failure = await away.loop.attempt(response, away.member)
            if response.finish_reason is None and (failure is not None or away.stopped):
                away.failure = failure
                raise Stopped
        away.response = None
        return complete(place, response.generation(response.finish_reason))

    async def _ask(self, away: _Away, environment: str, episode: Episode) -> Stepped:
        """What is asked for a play that is stopped meanwhile is not asked twice: the answer waits for the play."""
        if away.stopped:
            raise Stopped
        asked = self._asked.pop(away.number, None) or asyncio.ensure_future(self._pool.step(environment, episode))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._asked[away.number] = asked
            raise


class Clients:
    """The coordinator's side of them."""

    def __init__(self, setup: Setup, fleet: RolloutFleet, report: Callable[[str], None]) -> None:
        """`report`: gets a line when one is lost."""
        self._setup, self._fleet, self._report = setup, fleet, report
        self._hosts: list[Any] = []
        self._numbers = itertools.count()
        self._away: dict[int, Play] = {}
        """Plays that a process has, by number."""
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when all answer."""
        self._hosts = [self._start() for _ in range(self._fleet.config.client_processes)]
        await asyncio.gather(*(host.__ray_ready__.remote() for host in self._hosts))
        self._watches = [asyncio.create_task(self._watch(which)) for which in range(len(self._hosts))]

    async def play(self, place: str, play: Play) -> None:
        """`experience.generator.PlayAll`. Raises what `play_turns` raises there, and `RolloutFleet.lend`."""
        number, whole = next(self._numbers), play.whole
        which = zlib.crc32(whole.group_id.encode()) % len(self._hosts)
        thinks = whole.sampling.thinking is not None
        about = play.prompt, replace(whole, sampling=replace(whole.sampling, thinking=None)), thinks

        async def draw(lease: Lease) -> Drawn:
            host = self._hosts[which]
            order = pickle.dumps((number, place, lease, *about, play.carried(), play.request.begun), protocol=5)
            self._away[number] = play
            answer = asyncio.ensure_future(host.play.remote(order))
            try:
                drawn, carried, begun = pickle.loads(await asyncio.shield(answer))
            except asyncio.CancelledError:  # until it has ended, it may draw
                host.drop.remote(number)
                await asyncio.wait([answer], timeout=END_S)
                raise
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayActorError as error:
                return Drawn(over=False, failure=self._lost(which, host, in_words(error)))
            finally:
                del self._away[number]
            play.take(carried, begun)
            return drawn

        try:
            await self._fleet.lend(whole, draw, self._stop)
        except asyncio.CancelledError:
            self._hosts[which].drop.remote(number)  # its environment may still be asked
            raise

    async def refresh(self) -> None:
        """Takes over how far plays are, of processes that answer in time."""

        async def look(host: Any) -> None:
            with suppress(TimeoutError, ray.exceptions.RayError):
                async with asyncio.timeout(LOOK_S):
                    looked = await host.look.remote()
                for number, carried, begun in pickle.loads(looked):
                    if number in self._away:
                        self._away[number].take(carried, begun)

        if self._away:
            await asyncio.gather(*map(look, self._hosts))

    async def close(self) -> None:
        """Ends them. Never raises: it is called on the way out."""
        for watch in self._watches:
            watch.cancel()
        for host in self._hosts:
            ray.kill(host)

    def _start(self) -> Any:
        fleet = self._fleet
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": CALLS, "scheduling_strategy": here}
        return (
            ray.remote(ClientProcess)
            .options(**options)
            .remote(self._setup, fleet.config, fleet.timing, fleet.vocab_size, os.getcwd(), sys.path)
        )

    def _lost(self, which: int, host: Any, why: str) -> str:
        """Starts another one, once. Returns what was lost, in words."""
        what = f"client process {which}: {why}"
        if self._hosts[which] is host:
            self._report(f"{what}; starting another one")
            ray.kill(host)
            self._hosts[which] = self._start()
        return what

    async def _watch(self, which: int) -> None:
        while True:
            host = self._hosts[which]
            try:
                async with asyncio.timeout(SILENT_S):
                    await host.__ray_ready__.remote()
            except TimeoutError:
                self._lost(which, host, f"no answer within {SILENT_S:g} s")
            except ray.exceptions.RayError as error:
                self._lost(which, host, in_words(error))
            await asyncio.sleep(PING_S)

    def _stop(self, url: str, lost: bool) -> None:
        for host in self._hosts if self._away else ():
            host.stop.remote(url, lost)
