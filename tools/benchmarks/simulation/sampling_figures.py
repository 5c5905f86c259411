"""What a policy costs and what it trains on, from batches filled one after the other in virtual time."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dapo.experience.groups import ScoredGroup
from megatron_dapo.plan.lengths import Group, Workload
from tools.benchmarks.simulation.modelled_engine import Speed
from tools.benchmarks.simulation.modelled_fleet import ModelledFleet, Prompts
from tools.benchmarks.simulation.policies import Policy
from tools.benchmarks.simulation.virtual_time import run_virtually

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
    useful_accuracy: float

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
    utilisation: float
    """Share of all slots, over the step."""
    generated_tokens: float
    aborted_tokens: float
    trained_tokens: float
    length: float
    """Of the responses trained on."""
    accuracy: float
    """Of the responses trained on."""
    stale_share: float
    """Of the trained tokens: drawn by older weights than the newest before the update."""
    mean_staleness: float
    """Versions, over the trained tokens."""
    max_staleness: int
    """Versions, of any trained token."""


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
        useful_accuracy=float(np.mean([_accuracy(group) for group in kept])),
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
    rollout_s, batches = [], []
    begin, drawn, aborted, busy = 0.0, 0, 0, 0.0
    for step in range(1, conditions.warm_steps + conditions.steps + 1):
        if step == conditions.warm_steps + 1:
            begin, drawn, aborted, busy = loop.time(), fleet.drawn_tokens, fleet.aborted_tokens, fleet.busy_s
        start = loop.time()
        kept = await policy.fill(step, fleet.version)
        if step > conditions.warm_steps:
            rollout_s.append(loop.time() - start)
            batches.append(_batch(kept, fleet.version))
        await asyncio.sleep(conditions.train_s)
        await fleet.publish(conditions.sync_s)
    seconds, count = loop.time() - begin, conditions.steps
    figures = Figures(
        step_s=seconds / count,
        rollout_s=float(np.mean(rollout_s)),
        utilisation=(fleet.busy_s - busy) / seconds,
        generated_tokens=(fleet.drawn_tokens - drawn) / count,
        aborted_tokens=(fleet.aborted_tokens - aborted) / count,
        trained_tokens=float(np.mean([batch.tokens for batch in batches])),
        length=sum(batch.tokens for batch in batches) / sum(batch.responses for batch in batches),
        accuracy=float(np.mean([batch.accuracy for batch in batches])),
        stale_share=sum(batch.stale for batch in batches) / sum(batch.tokens for batch in batches),
        mean_staleness=sum(batch.staleness for batch in batches) / sum(batch.tokens for batch in batches),
        max_staleness=max(batch.oldest for batch in batches),
    )
    await policy.close()
    return figures


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    tokens: int
    responses: int
    accuracy: float
    stale: int
    staleness: int
    oldest: int


def _batch(kept: Sequence[ScoredGroup], version: int) -> _Batch:
    """Staleness counts from `version`, which the servers hold when the batch is full."""
    ages = [version - response.generation.weight_versions for group in kept for response in group.responses]
    return _Batch(
        tokens=sum(age.size for age in ages),
        responses=len(ages),
        accuracy=float(np.mean([group.correct / len(group.responses) for group in kept])),
        stale=sum(int(np.count_nonzero(age)) for age in ages),
        staleness=sum(int(age.sum()) for age in ages),
        oldest=max(int(age.max()) for age in ages),
    )


def _accuracy(group: Group) -> float:
    return group.correct / len(group.lengths)
