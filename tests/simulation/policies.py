"""Ways to fill a batch with useful groups, all over the same modelled servers.

`Ours` is the product's own sampler. The others are short accounts of what is done elsewhere: everything of a large
batch awaited, and the first groups to finish.
"""

import asyncio
import math
from pathlib import Path
from typing import Protocol

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.config.algorithm_config import AlgorithmConfig
from megatron_dapo.coordinator.sampler import DynamicSampler
from megatron_dapo.experience.groups import SamplerState, ScoredGroup
from megatron_dapo.storage.ledger import Event, Ledger
from tests.simulation.modelled_fleet import ModelledFleet, useful


class Policy(Protocol):
    """Fills one batch of N useful groups after the other."""

    async def fill(self, rollout_step: int, weight_version: int) -> tuple[ScoredGroup, ...]: ...

    async def close(self) -> None: ...


class _Rounds:
    """Rounds of `factor` x N prompts in order, until N useful groups are there."""

    def __init__(self, fleet: ModelledFleet, wanted: int, factor: float) -> None:
        self._fleet, self._wanted, self._size, self._next = fleet, wanted, math.ceil(factor * wanted), 0

    def send(self, version: int) -> "list[asyncio.Task[ScoredGroup]]":
        first, self._next = self._next, self._next + self._size
        generate = self._fleet.generate
        return [asyncio.ensure_future(generate(position, version)) for position in range(first, self._next)]

    async def close(self) -> None:
        """Nothing is in flight between batches."""


class BatchSynchronous(_Rounds):
    """All of a round awaited, the first N useful groups trained, the surplus thrown away."""

    async def fill(self, rollout_step: int, weight_version: int) -> tuple[ScoredGroup, ...]:
        kept: list[ScoredGroup] = []
        while len(kept) < self._wanted:
            kept += filter(useful, await asyncio.gather(*self.send(weight_version)))
        return tuple(kept[: self._wanted])


class FirstCompleted(_Rounds):
    """The first N useful groups to finish are trained, all others are aborted."""

    async def fill(self, rollout_step: int, weight_version: int) -> tuple[ScoredGroup, ...]:
        kept: list[ScoredGroup] = []
        while len(kept) < self._wanted:
            tasks = self.send(weight_version)
            for finished in asyncio.as_completed(tasks):
                group = await finished
                if useful(group):
                    kept.append(group)
                    if len(kept) == self._wanted:
                        break
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return tuple(kept)


class Ours:
    """`coordinator.sampler.DynamicSampler`, with a ledger in `folder`."""

    def __init__(
        self,
        fleet: ModelledFleet,
        algorithm: AlgorithmConfig,
        folder: Path,
        *,
        ahead: int = 0,
        hold: bool = False,
        waits: bool = False,
    ) -> None:
        """`ahead`: groups of the next batches that are in flight when a batch is full. What is unfinished then goes on;
        with `hold` it is interrupted; with `waits` its end is awaited."""
        self._ahead, self._hold = ahead, hold
        self._ledger = Ledger(folder / "ledger.jsonl")
        rate = PassRate.start(algorithm.dynamic_sampling.initial_pass_rate, memory=4.0 * algorithm.prompts_per_step)
        state = SamplerState(cursor=0, pass_rate=rate, carried=())
        holding = None if waits else fleet
        self._sampler = DynamicSampler(algorithm, fleet.generate, self._ledger, state, holding=holding)

    async def fill(self, rollout_step: int, weight_version: int) -> tuple[ScoredGroup, ...]:
        admission = await self._sampler.fill(rollout_step, weight_version, ahead=self._ahead, hold=self._hold)
        for group in admission.kept:
            self._ledger.record(
                Event.TRAINED, prompt=group.position, rollout_step=rollout_step, weight_version=weight_version
            )
        return admission.kept

    async def close(self) -> None:
        await self._sampler.close()
        self._ledger.close()
