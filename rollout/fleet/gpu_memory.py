"""Servers leave their accelerators' memory to the trainer, and take it back (the trainer is on the same GPUs).

SGLang frees weights, KV cache and CUDA graphs, keeps the weights in host memory, and takes everything back at the same
addresses. It must be idle for that: its scheduler ends on a release while a request runs. On a CPU the calls are the
same and free nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rollout.errors import RolloutError, ServerUnavailable
from rollout.fleet.balancer import Balancer, Member, State
from rollout.fleet.deadlines import Timing


class Occupation:
    """Who may be in the memory: all servers of the fleet, or none. All may at the start."""

    def __init__(self, members: Sequence[Member], balancer: Balancer, timing: Timing) -> None:
        self._members, self._balancer, self._timing = members, balancer, timing
        self._allowed = asyncio.Event()
        self._allowed.set()
        self._starts = 0
        self._none_starts = asyncio.Event()
        self._none_starts.set()

    @property
    def allowed(self) -> bool:
        """Whether servers may be in the memory."""
        return self._allowed.is_set()

    @asynccontextmanager
    async def start_of_a_server(self) -> AsyncIterator[None]:
        """A server's process may be started inside, beside those of others. Waits for the servers' turn: whoever gave
        it away ends that."""
        while not self.allowed:
            await self._allowed.wait()
        self._starts += 1
        self._none_starts.clear()
        try:
            yield
        finally:
            self._starts -= 1
            if not self._starts:
                self._none_starts.set()

    async def release(self) -> tuple[float | None, ...]:
        """Returns when no server holds memory. Requests wait from then on, and so do restarts of servers.

        Returns:
            Of each server, GB of each of its accelerators that it says it gave back, weights and KV cache; None: it was
            not serving, or was ended.

        Raises:
            RolloutError: a request is in flight.
        """
        running = sum(member.in_flight for member in self._members)
        if running or self._balancer.waiting:
            raise RolloutError(f"servers cannot leave their memory: {running} requests run; nothing was changed")
        self._balancer.close()
        self._allowed.clear()
        await self._none_starts.wait()
        return tuple(await asyncio.gather(*(self._release(member) for member in self._members)))

    async def resume(self) -> None:
        """Returns when every server that gave its memory up has it back. The others may be restarted again."""
        await asyncio.gather(*(self._resume(member) for member in self._members if member.serving))
        self._allowed.set()
        self._balancer.open()

    async def _release(self, member: Member) -> float | None:
        """None for a server that was ended instead: it was not serving, or failed to do as it was told."""
        client = member.client
        try:
            if member.serving:
                await member.call(client.flush_cache())  # refused while anything runs
                claimed = await member.call(client.memory_gb())
                with member.work():
                    await member.call(client.release_memory(self._timing.load_deadline_s))
                return claimed
        except ServerUnavailable as error:
            member.enter(State.DOWN, f"release of its memory: {error}")
        await member.engine.close()
        return None

    async def _resume(self, member: Member) -> None:
        try:
            with member.work():
                await member.call(member.client.resume_memory(self._timing.load_deadline_s))
        except ServerUnavailable as error:
            if member.serving:
                member.enter(State.DOWN, f"taking its memory back: {error}")
