"""One rollout step of a run computed again, from its batch and the checkpoint before it; without Ray or servers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import MicroBatchPlan
from megatron_dapo.actor.step_data import LogProbs, Responses, UpdateMetrics
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.coordinator.batch import (
    chunk_size,
    joined,
    mini_batches,
    objective_of,
    responses_of,
    step_arrays,
    step_correction,
)
from megatron_dapo.coordinator.checkpoints import load_progress
from megatron_dapo.coordinator.reference import reference_folder
from megatron_dapo.diagnostics.local_jobs import ActorJob, local_device, packing
from megatron_dapo.diagnostics.rank_pool import RankPool
from megatron_dapo.experience.groups import ScoredGroup
from megatron_dapo.monitor.writer import read_metrics
from megatron_dapo.storage.group_files import GroupFileError, batch_folder, load_groups

Part = tuple[Responses, MicroBatchPlan]


def replay_step(run: Path, config: Config, step: int, *, deadline_s: float) -> dict[str, tuple[float, float]]:
    """Loss, gradient norm and advantages of rollout step `step`: each as it was recorded and as it comes out now.

    Raises:
        ConfigError: no batch, no checkpoint after step - 1, or no line of this step in metrics.jsonl.
        RankError: a rank failed or gave no result in time.
    """
    checkpoint = run / "checkpoints" / f"step_{step - 1}" / "actor"
    try:
        groups, advantages = load_batch(run, step)
        reset = load_progress(checkpoint.parent).reference_step if step > 1 and checkpoint.is_dir() else 0
    except GroupFileError as error:
        raise ConfigError(str(error)) from None
    recorded = next((line for line in read_metrics(run) if line["rollout_step"] == step), None)
    if recorded is None:
        raise ConfigError(f"{run / 'metrics.jsonl'} has no line of rollout step {step}: it did not end")
    if step > 1 and not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint}: step {step} starts from the checkpoint before it; raise run.keep_checkpoints")
    weight = recorded.get("entropy_coefficient", config.algorithm.entropy_coefficient)
    config = replace(config.at_step(step), algorithm=replace(config.algorithm, entropy_coefficient=weight))
    with_kl = config.algorithm.kl.coefficient > 0
    job = ActorJob(
        config=config,
        deadline_s=deadline_s,
        checkpoint=checkpoint if step > 1 else None,
        keep_reference=with_kl,
        reference=reference_folder(run, reset) if reset and with_kl else None,
    )
    with RankPool(local_device(config)) as ranks:
        updates = _compute(job, ranks, groups, step)
    difference = np.abs(step_arrays(groups, config).advantages - advantages).max()
    return {
        "loss": (recorded["loss"], float(np.mean([update.loss for update in updates]))),
        "grad_norm": (recorded["grad_norm"], float(np.mean([update.grad_norm for update in updates]))),
        "largest difference of an advantage": (0.0, float(difference)),
    }


def _compute(job: ActorJob, ranks: RankPool, groups: Sequence[ScoredGroup], step: int) -> list[UpdateMetrics]:
    config, arrays = job.config, step_arrays(groups, job.config)
    # In the parts that the run computed them in: sums of another order would differ in the last bits.
    each = chunk_size(config.algorithm.prompts_per_step)
    chunks = [responses_of(groups[at : at + each]) for at in range(0, len(groups), each)]
    temperature = config.rollout.temperature
    old = joined(job.run(ranks, _log_probs, [(chunk, packing(config, chunk)) for chunk in chunks], temperature))
    reference = None
    if config.algorithm.kl.coefficient > 0:
        plan = packing(config, arrays.responses)
        reference = job.run(ranks, MegatronActor.reference_log_probs, arrays.responses, plan, temperature)
    correction = step_correction(arrays, old, config)
    hidden_size = HFModelConfig.load(Path(config.model.path)).hidden_size
    batches = mini_batches(arrays, old, reference, correction, config, step, hidden_size=hidden_size)
    objective = objective_of(config.algorithm)
    updates: list[UpdateMetrics] = job.run(ranks, MegatronActor.update, batches, objective, temperature)
    return updates


def _log_probs(actor: MegatronActor, parts: Sequence[Part], temperature: float) -> list[LogProbs | None]:
    return [actor.log_probs(responses, plan, temperature) for responses, plan in parts]


def load_batch(run_path: Path, step: int) -> tuple[tuple[ScoredGroup, ...], np.ndarray]:
    """Groups and advantages of `save_batch`.

    Raises:
        GroupFileError: there is none, or it is damaged.
    """
    folder = batch_folder(run_path, step)
    if not folder.is_dir():
        raise GroupFileError(f"{folder} is not there; a run keeps its latest batches with run.save_batches=true")
    groups, extra = load_groups(folder, "batch")
    return groups, np.array(extra["advantages"], np.float32)
