"""What a policy costs and what it trains on, from batches filled one after the other in virtual time."""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dapo.experience.groups import ScoredGroup
from megatron_dapo.plan.rollout import Workload
from tests.simulation.modelled_engine import Speed
from tests.simulation.modelled_fleet import ModelledFleet, Prompts
from tests.simulation.policies import Policy
from tests.simulation.virtual_time import run_virtually

_SAMPLE = 20_000
"""Groups that the workload's own figures are taken from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Everything but the policy."""

    workload: Workload
    speed: Speed
    engines: int
    slots: int
    """Responses that one engine runs at once."""
    train_s: float
    """Of one batch, between the end of its rollout and the new weights."""
    sync_s: float
    """In which no engine draws a token: new weights."""
    steps: int
    """That count."""
    warm_steps: int
    """Before them."""
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The workload itself: means over its groups, and what a batch takes at least."""

    useful_share: float
    group_tokens: float
    useful_length: float

    def least_tokens(self, wanted: int) -> float:
        """N / P(0 < k < G) groups of mean length."""
        return wanted / self.useful_share * self.group_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Means over the counted batches."""

    step_s: float
    """From batch to batch: rollout, training, new weights."""
    rollout_s: float
    """Of it, waiting for the batch."""
    generated_tokens: float
    aborted_tokens: float
    length: float
    """Of the responses trained on."""
    stale_share: float
    """Of the trained tokens: drawn by older weights than the newest before the update."""


MakePolicy = Callable[[ModelledFleet, Path], Policy]
"""On a fleet, with a folder of its own."""


def reference(prompts: Prompts) -> Reference:
    """From the first prompts of the order."""
    groups = [prompts.group(position) for position in range(_SAMPLE)]
    kept = [group for group in groups if group.kept]
    return Reference(
        useful_share=len(kept) / len(groups),
        group_tokens=float(np.mean([sum(group.lengths) for group in groups])),
        useful_length=float(np.mean([group.lengths for group in kept])),
    )


def measure(make: MakePolicy, conditions: Conditions) -> Figures:
    """Fill batches, train, publish, again and again."""
    with tempfile.TemporaryDirectory() as folder:
        return run_virtually(_measure(make, conditions, Path(folder)))


async def _measure(make: MakePolicy, conditions: Conditions, folder: Path) -> Figures:
    prompts = Prompts(conditions.workload, conditions.seed)
    fleet = ModelledFleet(prompts, engines=conditions.engines, slots=conditions.slots, speed=conditions.speed)
    policy = make(fleet, folder)
    loop = asyncio.get_running_loop()
    waited, kept = 0.0, list[ScoredGroup]()
    stale = 0
    begin, drawn, aborted = 0.0, 0, 0
    for step in range(1, conditions.warm_steps + conditions.steps + 1):
        if step == conditions.warm_steps + 1:
            begin, drawn, aborted = loop.time(), fleet.drawn_tokens, fleet.aborted_tokens
        start = loop.time()
        batch = await policy.fill(step, fleet.version)
        if step > conditions.warm_steps:
            waited += loop.time() - start
            kept += batch
            stale += sum(_stale_tokens(group, fleet.version) for group in batch)
        await asyncio.sleep(conditions.train_s)
        await fleet.publish(conditions.sync_s)
    count, tokens = conditions.steps, sum(group.tokens for group in kept)
    figures = Figures(
        step_s=(loop.time() - begin) / count,
        rollout_s=waited / count,
        generated_tokens=(fleet.drawn_tokens - drawn) / count,
        aborted_tokens=(fleet.aborted_tokens - aborted) / count,
        length=tokens / sum(len(group.responses) for group in kept),
        stale_share=stale / tokens,
    )
    await policy.close()
    return figures


def _stale_tokens(group: ScoredGroup, version: int) -> int:
    """Drawn before the weights `version`, which the servers hold when the batch is full."""
    return sum(int(np.count_nonzero(one.generation.weight_versions < version)) for one in group.responses)
