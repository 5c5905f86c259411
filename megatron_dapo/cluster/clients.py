"""Processes that talk to servers and environments for the coordinator (`rollout.client_processes`), so that its CPU
does not: Ray actors on its node.

    Clients.play --an order: how far the play is, a server that is lent for it--> ClientProcess: turn after turn there
                 <--how far it is: over, the server failed, or its requests were ended--

The coordinator keeps all that plays share: which server, publishes, attempts (`RequestLoop.lend`). A process that is
lost costs what its plays have drawn since the last look at them: each goes on from there, as after a lost server.
"""

import asyncio
import os
import pickle
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
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
LOOK_S = 10.0
"""For how far its plays are; past that what was known before stands."""
END_S = 10.0
"""For a play to end that nobody waits for any more."""


class Clients:
    """The coordinator's side of them."""

    def __init__(
        self,
        fleet: RolloutFleet,
        report: Callable[[str], None],
        reward: RewardConfig,
        decoder: Decoder,
        rules: Rules,
        thinking: ThinkingLimit | None,
    ) -> None:
        """`report`: gets a line when one is lost. `reward`: the run's; each process has its share of the environments'
        workers and connections."""
        self._fleet, self._report = fleet, report
        rollout, remote = fleet.config, reward.remote_environment
        share = max(1, rollout.client_processes)
        remote = replace(remote, connections=max(1, remote.connections // share))
        workers = max(1, reward.environment_workers // share)
        reward = replace(reward, environment_workers=workers, remote_environment=remote)
        servers = rollout, fleet.timing, fleet.vocab_size, fleet.api_key
        self._arguments = *servers, reward, decoder, rules, thinking, os.getcwd()
        self._hosts: list[Any] = []
        self._away: dict[str, Play] = {}
        """Plays that a process has, by the id of their request."""
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when all answer. The fleet has been started."""
        for member in self._fleet.members:
            member.stop_lent = self._stop
        self._hosts = [self._start() for _ in range(self._fleet.config.client_processes)]
        await asyncio.gather(*(host.__ray_ready__.remote() for host in self._hosts))
        self._watches = [asyncio.create_task(self._watch(which)) for which in range(len(self._hosts))]

    async def play(self, place: str, play: Play) -> None:
        """As `Responder.play`. Raises what that raises, and `RolloutFleet.lend`."""
        whole, key = play.whole, play.whole.request_id
        which = zlib.crc32(whole.group_id.encode()) % len(self._hosts)
        # How a limit of thinking is found in text stays in the process: it is no data.
        thinks = whole.sampling.thinking is not None
        about = key, place, play.prompt, replace(whole, sampling=replace(whole.sampling, thinking=None)), thinks
        came: dict[tuple[str, str], int] = {}
        """Weight version with which each turn came to each server (`Response.home`)."""

        async def draw(member: Member) -> Drawn:
            host, version = self._hosts[which], member.weight_version
            since = came.setdefault((member.url, play.request.request_id), version)
            server = member.url, (member.info, version, member.weight_label), since
            order = pickle.dumps((*about, *server, play.carried(), play.request.begun), protocol=5)
            self._away[key] = play
            answer = asyncio.ensure_future(host.play.remote(order))
            try:
                drawn, carried, begun = pickle.loads(await asyncio.shield(answer))
            except asyncio.CancelledError:  # until it has ended, it may draw
                host.drop.remote(key)
                await asyncio.wait([answer], timeout=END_S)
                raise
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayActorError as error:
                return Drawn(over=False, failure=self._lost(which, host, in_words(error)))
            finally:
                del self._away[key]
            play.take(carried, begun)
            came.setdefault((member.url, play.request.request_id), version)
            return drawn

        try:
            await self._fleet.lend(whole, draw)
        except asyncio.CancelledError:
            self._hosts[which].drop.remote(key)  # its environment may still be asked
            raise

    async def refresh(self) -> None:
        """Takes over how far plays are, of processes that answer in time."""

        async def look(host: Any) -> None:
            with suppress(TimeoutError, ray.exceptions.RayError):
                async with asyncio.timeout(LOOK_S):
                    looked = await host.look.remote()
                for key, carried, begun in pickle.loads(looked):
                    if key in self._away:
                        self._away[key].take(carried, begun)

        if self._away:
            await asyncio.gather(*map(look, self._hosts))

    async def close(self) -> None:
        """Ends them. Never raises: it is called on the way out."""
        for watch in self._watches:
            watch.cancel()
        for host in self._hosts:
            ray.kill(host)

    def _start(self) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": CALLS, "scheduling_strategy": here}
        return ray.remote(ClientProcess).options(**options).remote(*self._arguments)

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
