"""Servers leave their accelerators' memory to a trainer on the same GPUs, and take it back.

SGLang frees weights, KV cache and CUDA graphs, keeps the weights in host memory, and takes everything back at the same
addresses. The server must be idle: its scheduler crashes on a release while a request runs. On a CPU the calls are the
same and free nothing.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout.errors import RolloutError, ServerUnavailable
from rollout.fleet.balancer import Balancer
from rollout.fleet.member import Member, State, Timing


class GpuMemory:
    """Whose the memory is: the servers' or the trainer's. At the start it is the servers'."""

    def __init__(self, balancer: Balancer, timing: Timing) -> None:
        self._balancer, self._timing = balancer, timing
        self._starting = 0
        self._with_servers, self._none_starting = asyncio.Event(), asyncio.Event()
        self._with_servers.set()
        self._none_starting.set()

    @property
    def with_servers(self) -> bool:
        return self._with_servers.is_set()

    @asynccontextmanager
    async def server_start(self) -> AsyncIterator[None]:
        """Around the start of a server's process. Waits until the memory is the servers'; several may start at once."""
        while not self.with_servers:
            await self._with_servers.wait()
        self._starting += 1
        self._none_starting.clear()
        try:
            yield
        finally:
            self._starting -= 1
            if not self._starting:
                self._none_starting.set()

    async def release(self) -> tuple[float | None, ...]:
        """Returns when no server holds memory. From then on requests and restarts of servers wait.

        Returns:
            Of each server, the GB on each of its accelerators that it says it gave back, weights and KV cache. None: it
            was not serving, or was ended.

        Raises:
            RolloutError: a request is in flight.
        """
        running = sum(member.in_flight for member in self._balancer.members)
        if running or self._balancer.waiting:
            raise RolloutError(f"servers cannot leave their memory: {running} requests run; nothing was changed")
        self._balancer.close()
        self._with_servers.clear()
        await self._none_starting.wait()
        return tuple(await asyncio.gather(*(self._release(member) for member in self._balancer.members)))

    async def resume(self) -> None:
        """Returns when every server that gave its memory up has it back. The others may be restarted again."""
        await asyncio.gather(*(self._resume(member) for member in self._balancer.members if member.serving))
        self._with_servers.set()
        self._balancer.open()

    async def _release(self, member: Member) -> float | None:
        client = member.client
        try:
            if member.serving:
                await member.call(client.flush_cache())  # refused while anything runs
                claimed = await member.call(client.memory_gb())
                with member.busy():
                    await member.call(client.release_memory(self._timing.load_deadline_s))
                return claimed
        except ServerUnavailable as error:
            member.enter(State.DOWN, f"release of its memory: {error}")
        await member.engine.close()
        return None

    async def _resume(self, member: Member) -> None:
        try:
            with member.busy():
                await member.call(member.client.resume_memory(self._timing.load_deadline_s))
        except ServerUnavailable as error:
            if member.serving:
                member.enter(State.DOWN, f"taking its memory back: {error}")
