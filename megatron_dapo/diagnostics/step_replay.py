"""One rollout step of a run computed again, from its batch and the checkpoint before it; without Ray or servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import MicroBatchPlan, plan_for_actor
from megatron_dapo.actor.ranks import RankPlace, RankPool
from megatron_dapo.actor.step_data import LogProbs, MiniBatch, Responses, UpdateMetrics
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.coordinator.batch import mini_batches, objective_of, responses_of, step_arrays, step_correction
from megatron_dapo.coordinator.old_log_probs import chunk_size, joined
from megatron_dapo.experience.groups import ScoredGroup
from megatron_dapo.monitor.writer import read_metrics
from megatron_dapo.storage.group_files import load_batch

Part = tuple[Responses, MicroBatchPlan]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One number of the step, as it was recorded and as it comes out now."""

    name: str
    recorded: float
    now: float

    @property
    def difference(self) -> float:
        """Relative to the recorded one; absolute where that is 0."""
        return abs(self.now - self.recorded) / (abs(self.recorded) or 1.0)


def replay(
    run_path: Path, config: Config, step: int, *, device: Literal["cpu", "cuda"], deadline_s: float
) -> list[Compared]:
    """Loss, gradient norm and advantages of rollout step `step`.

    Raises:
        ConfigError: no checkpoint after step - 1, or no line of this step in metrics.jsonl.
        GroupFileError: the batch is not there or damaged.
        RankError: a rank failed or gave no result in time.
    """
    groups, advantages = load_batch(run_path, step)
    recorded = next((line for line in read_metrics(run_path) if line["rollout_step"] == step), None)
    if recorded is None:
        raise ConfigError(f"{run_path / 'metrics.jsonl'} has no line of rollout step {step}: it did not end")
    checkpoint = run_path / "checkpoints" / f"step_{step - 1}" / "actor"
    if step > 1 and not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint} is not there: a replay of step {step} starts from the checkpoint before it")
    arrays = step_arrays(groups, config)
    with RankPool(device) as pool:
        job = _Job(config=config, checkpoint=checkpoint if step > 1 else None, timeout_s=deadline_s)
        updates = _compute(pool, job, groups, step, deadline_s)
    return [
        Compared(name="loss", recorded=recorded["loss"], now=float(np.mean([update.loss for update in updates]))),
        Compared(
            name="grad_norm",
            recorded=recorded["grad_norm"],
            now=float(np.mean([update.grad_norm for update in updates])),
        ),
        Compared(
            name="largest difference of an advantage",
            recorded=0.0,
            now=float(np.abs(arrays.advantages - advantages).max()),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class _Job:
    config: Config
    checkpoint: Path | None
    timeout_s: float


def _compute(
    pool: RankPool, job: _Job, groups: Sequence[ScoredGroup], step: int, deadline_s: float
) -> list[UpdateMetrics]:
    config, world = job.config, job.config.actor.layout.world_size
    hidden_size = HFModelConfig.load(Path(config.model.path)).hidden_size
    arrays = step_arrays(groups, config)
    # In the parts that the run computed them in: sums of another order would differ in the last bits.
    each = chunk_size(config.algorithm.prompts_per_step)
    chunks = [responses_of(groups[at : at + each]) for at in range(0, len(groups), each)]
    parts = [(chunk, _plan(chunk, config, hidden_size)) for chunk in chunks]
    old = joined(pool.run(world, _log_probs, job, parts, False, timeout_s=deadline_s)[0])
    reference = None
    if config.algorithm.kl.coefficient > 0:
        whole = [(arrays.responses, _plan(arrays.responses, config, hidden_size))]
        reference = joined(pool.run(world, _log_probs, job, whole, True, timeout_s=deadline_s)[0])
    correction = step_correction(arrays, old, config)
    batches = mini_batches(arrays, old, reference, correction, config, step, hidden_size=hidden_size)
    return pool.run(world, _update, job, batches, objective_of(config.algorithm), timeout_s=deadline_s)[0]


def _plan(responses: Responses, config: Config, hidden_size: int) -> MicroBatchPlan:
    return plan_for_actor(responses.sequence_lengths, config.actor, hidden_size=hidden_size)


def _log_probs(place: RankPlace, job: _Job, parts: Sequence[Part], reference: bool) -> list[LogProbs | None]:
    actor = _actor(place, job)
    method = actor.reference_log_probs if reference else actor.log_probs
    return [method(responses, plan, job.config.rollout.temperature) for responses, plan in parts]


def _update(
    place: RankPlace, job: _Job, batches: list[MiniBatch], objective: PolicyObjective
) -> list[UpdateMetrics] | None:
    return _actor(place, job).update(batches, objective, job.config.rollout.temperature)


def _actor(place: RankPlace, job: _Job):  # type: ignore[no-untyped-def]  # MegatronActor: imports Megatron
    from megatron_dapo.actor.actor import MegatronActor

    config = job.config
    actor = MegatronActor(
        config.actor,
        config.model,
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        steps_per_rollout=config.algorithm.mini_batches_per_step,
        seed=config.run.seed,
        timeout_s=job.timeout_s,
        keep_reference=config.algorithm.kl.coefficient > 0,
    )
    if job.checkpoint is not None:
        actor.load_checkpoint(job.checkpoint)
    return actor
