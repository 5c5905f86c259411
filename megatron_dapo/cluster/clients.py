"""Processes that talk to servers and environments for the coordinator (`rollout.client_processes`), so that its CPU
does not: Ray actors on its node.

    Clients.play --an order: a server that is lent for the play--> ClientProcess: turn after turn there
                 <--the play is over, the server failed, or its requests were ended--

The coordinator keeps all that plays share: which server, publishes, attempts (`RequestLoop.lend`). A play stays in its
process until it is over; before a checkpoint the coordinator looks how far each is. A process that is lost costs what
was drawn since: its plays go on from there, as after a lost server.
"""

import asyncio
import os
import pickle
import zlib
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_dapo.cluster.client_process import ClientProcess
from megatron_dapo.cluster.trainer import in_words
from megatron_dapo.data.tokenizer import Decoder
from megatron_dapo.experience.episodes import Play, Rules
from reward.config import RewardConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.member import Member
from rollout.fleet.request_loop import Drawn
from rollout.generation import ThinkingLimit

CALLS = 1_000_000
"""Of a process at a time: each play is one."""
PING_S, SILENT_S = 5.0, 120.0
"""Between two questions to a process, and for its answer, its start too; past that another one takes its place."""
STOP_S = 10.0
"""For it to stop at a server, of the `Timing.control_deadline_s` that the server has for its requests to end."""
LOOKED, LOOK_S = 64, 10.0
"""Plays that it is asked about at once, and for its answer; past that what was known before stands."""
END_S = 10.0
"""For a play to end that nobody waits for any more."""


@dataclass(eq=False, repr=False)
class Clients:
    """The coordinator's side of them."""

    fleet: RolloutFleet
    report: Callable[[str], None]
    """Gets a line when one is lost."""
    reward: RewardConfig
    """The run's; each process has its share of the environments' workers and connections."""
    decoder: Decoder
    rules: Rules
    thinking: ThinkingLimit | None

    def __post_init__(self) -> None:
        fleet, rollout, remote = self.fleet, self.fleet.config, self.reward.remote_environment
        share = max(1, rollout.client_processes)
        remote = replace(remote, connections=max(1, remote.connections // share))
        workers = max(1, self.reward.environment_workers // share)
        reward = replace(self.reward, workers=1, environment_workers=workers, remote_environment=remote)
        servers = rollout, fleet.timing, fleet.vocab_size, fleet.api_key
        self._arguments = *servers, reward, self.decoder, self.rules, self.thinking, os.getcwd()
        self._hosts, self._starting = list[Any](), set[Any]()
        self._away: dict[str, tuple[int, Play]] = {}
        """(which process has it, play), by the id of its request."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Returns when all answer. The fleet has been started."""
        for member in self.fleet.members:
            member.stop_lent = self._stop
        self._hosts = [self._start() for _ in range(self.fleet.config.client_processes)]
        await asyncio.gather(*(host.__ray_ready__.remote() for host in self._hosts))
        for which in range(len(self._hosts)):
            self._keep(self._watch(which))

    async def play(self, place: str, play: Play) -> None:
        """As `Responder.play`. Raises what that raises, and `RolloutFleet.lend`."""
        key, which = play.whole.request_id, zlib.crc32(play.whole.group_id.encode()) % len(self._hosts)
        # Without its limit of thinking, which the process has: how that is found in text is no data.
        whole = replace(play.whole, sampling=replace(play.whole.sampling, thinking=None))
        at: Any = None
        """The process that has the play."""

        async def draw(member: Member) -> Drawn:
            nonlocal at
            host, server = self._hosts[which], (member.info, member.weight_version, member.weight_label)
            fresh = None if host is at else (play.prompt, whole, play.carried(), play.request.begun)
            order = pickle.dumps((key, place, member.url, server, fresh), protocol=5)
            at = host
            answer = asyncio.ensure_future(host.play.remote(order))
            try:
                drawn, raised, progress = pickle.loads(await asyncio.shield(answer))
            except asyncio.CancelledError:  # until it has ended, it may draw
                host.drop.remote(key)
                await asyncio.wait([answer], timeout=END_S)
                raise
            except ray.exceptions.RayActorError as error:
                return Drawn(over=False, failure=self._lost(which, host, in_words(error)))
            if progress is not None:
                play.take(*progress)
            if raised is not None:
                raise raised
            return drawn

        self._away[key] = which, play
        try:
            await self.fleet.lend(whole, draw)
        except asyncio.CancelledError:
            self._hosts[which].drop.remote(key)  # it may be there without a server, or `drop` came before its order
            raise
        finally:
            del self._away[key]

    async def refresh(self) -> None:
        """Takes over how far plays are, of processes that answer in time."""

        async def look(which: int) -> None:
            keys = [key for key, (at, _) in self._away.items() if at == which]
            with suppress(TimeoutError, ray.exceptions.RayError):
                for first in range(0, len(keys), LOOKED):
                    async with asyncio.timeout(LOOK_S):
                        looked = await self._hosts[which].look.remote(keys[first : first + LOOKED])
                    for key, carried, begun in pickle.loads(looked):
                        if key in self._away:
                            self._away[key][1].take(carried, begun)

        await asyncio.gather(*map(look, range(len(self._hosts))))

    async def close(self) -> None:
        """Ends them. Never raises: it is called on the way out."""
        for task in self._tasks:
            task.cancel()
        for host in self._hosts:
            ray.kill(host)
        self._hosts = []

    def _start(self) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": CALLS, "scheduling_strategy": here}
        return ray.remote(ClientProcess).options(**options).remote(*self._arguments)

    def _lost(self, which: int, host: Any, why: str) -> str:
        """Starts another one, once. Returns what was lost, in words."""
        what = f"client process {which}: {why}"
        if self._hosts[which] is host:
            self.report(f"{what}; starting another one")
            ray.kill(host)
            self._hosts[which] = self._start()
            self._starting.add(self._hosts[which])
        return what

    def _stop(self, url: str, lost: bool) -> None:
        for which, host in enumerate(self._hosts if self._away else ()):
            if host not in self._starting:  # it draws nowhere, and imports for longer than this may take
                self._keep(self._answered(which, host, host.stop.remote(url, lost), STOP_S))

    async def _watch(self, which: int) -> None:
        while True:
            host = self._hosts[which]
            await self._answered(which, host, host.__ray_ready__.remote(), SILENT_S)
            self._starting.discard(host)
            await asyncio.sleep(PING_S)

    async def _answered(self, which: int, host: Any, answer: Awaitable[None], deadline_s: float) -> None:
        """Starts another process if this one does not answer."""
        try:
            async with asyncio.timeout(deadline_s):
                await answer
        except TimeoutError:
            self._lost(which, host, f"no answer within {deadline_s:g} s")
        except ray.exceptions.RayError as error:
            self._lost(which, host, in_words(error))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
