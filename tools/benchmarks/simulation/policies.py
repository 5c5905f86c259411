"""Ways to fill a batch with useful groups, all over the same modelled servers.

`Ours` is the product's own sampler. The others are short accounts of what is done elsewhere: everything of a large
batch awaited, the first groups to finish, and tail batching.
"""

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config.algorithm_config import AlgorithmConfig
from megatron_dapo.coordinator.sampler import DynamicSampler, SamplerState
from megatron_dapo.experience.groups import ScoredGroup
from megatron_dapo.storage.ledger import Event, Ledger
from tools.benchmarks.simulation.modelled_fleet import ModelledFleet, useful


class Policy(Protocol):
    """Fills one batch of N useful groups after the other."""

    async def fill(self, rollout_step: int, weight_version: int) -> tuple[ScoredGroup, ...]: ...

    async def close(self) -> None: ...


class _Prompts:
    """Positions in order, and the groups sent for."""

    def __init__(self, fleet: ModelledFleet) -> None:
        self.fleet = fleet
        self.next = 0

    def fresh(self, number: int) -> list[int]:
        self.next += number
        return list(range(self.next - number, self.next))

    def send(self, positions: Iterable[int], version: int) -> "dict[asyncio.Task[ScoredGroup], int]":
        return {asyncio.ensure_future(self.fleet.generate(position, version)): position for position in positions}


class BatchSynchronous:
    """`factor` x N prompts, all awaited, the first N useful groups trained, the surplus thrown away; again if short."""

    def __init__(self, fleet: ModelledFleet, wanted: int, factor: float) -> None:
        self._prompts, self._wanted, self._size = _Prompts(fleet), wanted, math.ceil(factor * wanted)

    async def fill(self, rollout_step: int, weight_version: int) -> tuple[ScoredGroup, ...]:
        kept: list[ScoredGroup] = []
        while len(kept) < self._wanted:
            groups = await asyncio.gather(*self._prompts.send(self._prompts.fresh(self._size), weight_version))
            kept += filter(useful, groups)
        return tuple(kept[: self._wanted])

    async def close(self) -> None:
        """Nothing is in flight between batches."""


class FirstCompleted:
    """`factor` x N prompts; the first N useful groups to finish are trained, all others are aborted."""

    def __init__(self, fleet: ModelledFleet, wanted: int, factor: float) -> None:
        self._prompts, self._wanted, self._size = _Prompts(fleet), wanted, math.ceil(factor * wanted)

    async def fill(self, rollout_step: int, weight_version: int) -> tuple[ScoredGroup, ...]:
        kept: list[ScoredGroup] = []
        while len(kept) < self._wanted:
            tasks = self._prompts.send(self._prompts.fresh(self._size), weight_version)
            await first_useful(tasks, kept, self._wanted)
        return tuple(kept)

    async def close(self) -> None:
        """Nothing is in flight between batches."""


async def first_useful(
    tasks: "dict[asyncio.Task[ScoredGroup], int]", kept: list[ScoredGroup], wanted: int
) -> list[int]:
    """Adds useful groups to `kept` in the order of completion, up to `wanted`. The positions that were cut off then."""
    for finished in asyncio.as_completed(tasks):
        group = await finished
        if useful(group):
            kept.append(group)
            if len(kept) == wanted:
                break
    cut = [position for task, position in tasks.items() if not task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return cut


class TailBatching:
    """Short rounds: `speculation` x as many prompts as needed, the first N useful groups trained, the others cut off
    and put aside. When enough are aside to fill a batch, they have a long round of their own, which is awaited; useful
    groups beyond N that it brings begin the next batch."""

    def __init__(self, fleet: ModelledFleet, wanted: int, speculation: float) -> None:
        self._prompts, self._wanted, self._speculation = _Prompts(fleet), wanted, speculation
        self._aside: deque[int] = deque()
        self._surplus: list[ScoredGroup] = []
        self._rate = PassRate.start(0.5, memory=4.0 * wanted)

    async def fill(self, rollout_step: int, weight_version: int) -> tuple[ScoredGroup, ...]:
        kept = self._surplus[: self._wanted]
        self._surplus = self._surplus[self._wanted :]
        while len(kept) < self._wanted:
            needed = math.ceil((self._wanted - len(kept)) / self._rate.mean)
            if len(self._aside) >= needed:
                await self._long_round(needed, kept, weight_version)
            else:
                await self._short_round(math.ceil(needed * self._speculation), kept, weight_version)
        return tuple(kept)

    async def _short_round(self, number: int, kept: list[ScoredGroup], weight_version: int) -> None:
        tasks = self._prompts.send(self._prompts.fresh(number), weight_version)
        before = len(kept)
        cut = await first_useful(tasks, kept, self._wanted)
        self._aside.extend(cut)
        found = len(kept) - before
        self._rate = self._rate.update(kept=found, filtered=len(tasks) - len(cut) - found)

    async def _long_round(self, number: int, kept: list[ScoredGroup], weight_version: int) -> None:
        positions = [self._aside.popleft() for _ in range(number)]
        groups = await asyncio.gather(*self._prompts.send(positions, weight_version))
        found = [group for group in groups if useful(group)]
        missing = self._wanted - len(kept)
        kept += found[:missing]
        self._surplus += found[missing:]

    async def close(self) -> None:
        """Nothing is in flight between batches."""


class Ours:
    """`coordinator.sampler.DynamicSampler`, with a ledger in `folder`."""

    def __init__(self, fleet: ModelledFleet, algorithm: AlgorithmConfig, folder: Path, *, ahead: int = 0) -> None:
        """`ahead`: groups of the next batches that are in flight when a batch is full; 0 waits for all."""
        self._ahead = ahead
        self._ledger = Ledger(folder / "ledger.jsonl")
        rate = PassRate.start(algorithm.dynamic_sampling.initial_pass_rate, memory=4.0 * algorithm.prompts_per_step)
        state = SamplerState(cursor=0, pass_rate=rate, carried=())
        self._sampler = DynamicSampler(algorithm, fleet.generate, self._ledger, state)

    async def fill(self, rollout_step: int, weight_version: int) -> tuple[ScoredGroup, ...]:
        admission = await self._sampler.fill(rollout_step, weight_version, ahead=self._ahead)
        for group in admission.kept:
            self._ledger.record(
                Event.TRAINED, prompt=group.position, rollout_step=rollout_step, weight_version=weight_version
            )
        return admission.kept

    async def close(self) -> None:
        await self._sampler.close()
        self._ledger.close()
