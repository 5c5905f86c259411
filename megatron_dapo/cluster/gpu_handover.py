"""`run.mode: colocated`: trainer and servers are on the same GPUs and use their memory in turn.

    servers write  -> [servers leave] -> trainer: log-probs, update -> [their weights come back] -> new weights
                   -> [all of their memory comes back] -> ...

    await handover.to_trainer()  # the memory is the trainer's, and stays so until the servers want it

At each edge the GPUs' free memory is measured and compared with what the coming side needs, so that the wrong side is
named instead of an out-of-memory error somewhere in the other. What the trainer leaves on a GPU outside its calls is
`actor.offload.between_phases`; with `actor.offload.communicators` NCCL's buffers leave it before the servers come, and
are there again for the trainer's next call. On the CPU the servers are told the same, and there is nothing to measure.
"""

from collections.abc import Callable

from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.cluster.trainer_rank import GIB
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config.run_config import RunConfig
from rollout.fleet.fleet import RolloutFleet

LEAST_GIVEN = 0.9
"""Share of what a server says it gave back that the GPU must have got: pages are rounded, the sums are not exact."""


class MemoryNotFree(RuntimeError):
    """A GPU's memory was not left to the side that needs it. The message names the GPU and who holds what."""

    exit_code = 2


class GpuHandover:
    """Who has the GPUs' memory. The servers at the start. Where memory is not shared, everybody always has it."""

    def __init__(
        self, config: RunConfig, fleet: RolloutFleet, trainer: Trainer, waits: Waits, *, report: Callable[[str], None]
    ) -> None:
        """`report` gets a line at the first handover."""
        self._fleet, self._trainer, self._waits, self._report = fleet, trainer, waits, report
        self.shared, self._deadline_s, self.trainer_has_it = config.mode == "colocated", config.step_deadline_s, False
        self._freed: dict[int, int] = {}
        """Bytes that the servers' leaving freed on each rank's GPU."""

    async def to_trainer(self) -> None:
        """The trainer may use the memory from now on. No request may be in flight.

        Raises:
            MemoryNotFree: the servers still hold memory.
        """
        if self.trainer_has_it or not self.shared:
            return
        before = await self._trainer.device_memory()
        release = self._fleet.release_memory()
        claims = await self._waits.wait_for("memory for the trainer", "rollout servers", self._deadline_s, release)
        after = await self._trainer.device_memory()
        self.trainer_has_it = True
        freed = {now.rank: now.free - then.free for then, now in zip(before, after, strict=True)}
        # Servers are on the GPUs of neighbouring ranks, all on as many. One that was down had nothing to leave.
        claimed = {now.rank: claims[now.rank * len(claims) // len(after)] or 0.0 for now in after}
        if short := [now for now in after if freed[now.rank] < LEAST_GIVEN * claimed[now.rank] * GIB]:
            held = [f"{now.line()}, {claimed[now.rank]:.1f} claimed" for now in short]
            raise MemoryNotFree("\n  ".join(["less memory became free than rollout servers say they left:", *held]))
        if after and not self._freed:
            least = min(freed[rank] for rank in freed if claimed[rank] == max(claimed.values())) / GIB
            self._report(f"colocated: servers leave {least:.1f} GiB of each GPU to the trainer, {after[0].line()}")
        self._freed = freed

    async def to_servers(self, *, weights_only: bool = False) -> None:
        """The servers have their memory from now on; `weights_only`: that of their weights, which the trainer may send
        now, beside its own. The rest comes with a second call.

        Raises:
            MemoryNotFree: the trainer still holds memory that they had left.
        """
        if not self.trainer_has_it:
            return
        await self._trainer.suspend_communicators()
        before = await self._trainer.device_memory()
        if short := [now for now in before if now.free < self._freed[now.rank]]:
            held = [f"{now.line()}, {self._freed[now.rank] / GIB:.1f} wanted back" for now in short]
            remedy = "set actor.offload.between_phases to all, or lower rollout.memory_fraction"
            told = f"rollout servers cannot take back what they left to the trainer; {remedy}:"
            raise MemoryNotFree("\n  ".join([told, *held]))
        resume = self._fleet.resume_memory(weights_only=weights_only)
        await self._waits.wait_for("memory for the servers", "rollout servers", self._deadline_s, resume)
        self.trainer_has_it = weights_only
        for then, now in zip(before, await self._trainer.device_memory() if weights_only else (), strict=False):
            self._freed[now.rank] -= then.free - now.free
