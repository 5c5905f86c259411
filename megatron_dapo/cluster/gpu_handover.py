"""`run.mode: colocated`: trainer and servers are on the same GPUs, and take turns in their memory.

    servers write  -> [servers leave] -> trainer: log-probs, update, export -> [servers come back] -> new weights -> ...

At each edge the GPUs' free memory is measured and compared with what the coming side needs, so that the wrong side is
named instead of an out-of-memory error somewhere in the other. What the trainer leaves on a GPU outside its calls is
`actor.offload.between_phases`. On the CPU the servers are told the same, and there is nothing to measure.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config.run_config import RunConfig

T = TypeVar("T")

GIB = 2**30
LEAST_GIVEN = 0.9
"""Share of what a server says it gave back that the GPU must have got: pages are rounded, the sums are not exact."""


class MemoryNotFree(RuntimeError):
    """A GPU's memory was not left to the side whose turn it is. The message names the GPU and who holds what."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """A trainer rank's GPU, in bytes."""

    rank: int
    free: int
    total: int
    held: int
    """By the rank's own allocator."""

    def line(self) -> str:
        return (
            f"rank {self.rank}: {self.free / GIB:.1f} of {self.total / GIB:.1f} GiB free, "
            f"{self.held / GIB:.1f} held by the trainer"
        )


class Fleet(Protocol):
    """What is used of rollout.fleet.fleet.RolloutFleet."""

    async def release_memory(self) -> Sequence[float | None]: ...

    async def resume_memory(self) -> None: ...


class Turns:
    """Whose turn it is. The servers' at the start. Where memory is not shared it is always everybody's."""

    def __init__(
        self,
        config: RunConfig,
        fleet: Fleet,
        look: Callable[[], Awaitable[Sequence[DeviceMemory]]],
        waits: Waits,
        *,
        report: Callable[[str], None],
    ) -> None:
        """
        Args:
            look: the GPU of each trainer rank now; nothing on the CPU.
            report: gets a line at the first handover.
        """
        self._fleet, self._look, self._waits, self._report = fleet, look, waits, report
        self._shared, self._deadline_s = config.mode == "colocated", config.step_deadline_s
        self._trainers = False
        self._given: dict[int, int] = {}
        """Bytes that the servers' leaving freed on each rank's GPU."""

    async def trainer(self) -> None:
        """Returns when the trainer may use the memory. No request may be in flight.

        Raises:
            MemoryNotFree: the servers still hold memory.
        """
        if not self._shared or self._trainers:
            return
        before = await self._look()
        claims = await self._wait("memory for the trainer", self._fleet.release_memory())
        after = await self._look()
        self._trainers = True
        given = {now.rank: now.free - then.free for then, now in zip(before, after, strict=True)}
        # Servers are on the GPUs of neighbouring ranks, all on as many. One that was down had nothing to leave.
        claimed = {now.rank: claims[now.rank * len(claims) // len(after)] or 0.0 for now in after}
        short = [
            f"{now.line()}, {claimed[now.rank]:.1f} claimed"
            for now in after
            if given[now.rank] < LEAST_GIVEN * claimed[now.rank] * GIB
        ]
        if short:
            raise MemoryNotFree(
                "less memory became free than rollout servers say that they left:\n  " + "\n  ".join(short)
            )
        if after and not self._given:
            least = min(given[rank] for rank in given if claimed[rank] == max(claimed.values())) / GIB
            self._report(f"colocated: servers leave {least:.1f} GiB of each GPU to the trainer, {after[0].line()}")
        self._given = given

    async def servers(self) -> None:
        """Returns when the servers have their memory back.

        Raises:
            MemoryNotFree: the trainer still holds memory that they had left.
        """
        if not self._trainers:
            return
        short = [
            f"{now.line()}, {self._given[now.rank] / GIB:.1f} wanted back"
            for now in await self._look()
            if now.free < self._given[now.rank]
        ]
        if short:
            raise MemoryNotFree(
                "rollout servers cannot take back what they left to the trainer; set actor.offload.between_phases to "
                "all, or lower rollout.memory_fraction:\n  " + "\n  ".join(short)
            )
        await self._wait("memory for the servers", self._fleet.resume_memory())
        self._trainers = False

    async def _wait(self, what: str, answer: Awaitable[T]) -> T:
        return await self._waits.wait_for(what, "rollout servers", self._deadline_s, answer)
