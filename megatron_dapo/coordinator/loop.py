"""The run, as Algorithm 1 of the paper tells it.

prompts -> ledger -> rollouts -> verdicts -> dynamic sampling -> advantages -> mu updates -> new weights -> servers
"""

from contextlib import suppress
from dataclasses import dataclass, replace

from megatron_dapo.actor.step_data import LogProbs, UpdateMetrics
from megatron_dapo.algorithm.importance import Correction
from megatron_dapo.cluster import gc_policy
from megatron_dapo.cluster.trainer import TrainerError, TrainerStalled
from megatron_dapo.cluster.waits import StopRequested
from megatron_dapo.coordinator.batch import StepArrays, mini_batches, step_arrays, step_correction
from megatron_dapo.coordinator.log_prob_stream import LogProbStream
from megatron_dapo.coordinator.progress import Progress
from megatron_dapo.coordinator.publish import publish_weights
from megatron_dapo.coordinator.run_context import Parts
from megatron_dapo.coordinator.sampler import groups_ahead
from megatron_dapo.coordinator.step_metrics import Gap, StepRecord, check_mismatch, step_metrics, write_samples
from megatron_dapo.experience.evaluation import Answers
from megatron_dapo.experience.groups import Admission
from megatron_dapo.monitor.timeline import Phases
from megatron_dapo.storage.batch_files import save_batch
from megatron_dapo.storage.ledger import Event


async def train(parts: Parts, progress: Progress) -> Progress:
    """Rollout steps until `run.rollout_steps` are done. Returns where the run then stands.

    A step that cannot be filled, or is asked to stop meanwhile, has changed no weights: what was reached before it is
    kept in a checkpoint.
    """
    run = parts.config.run
    while progress.rollout_step < run.rollout_steps:
        phases = parts.timeline.begin(progress.rollout_step + 1)
        try:
            filled = await fill_batch(parts, progress, phases)
        except (TrainerError, TrainerStalled):
            raise  # nobody is left who could save
        except StopRequested:
            await _keep(parts, progress)  # a save that fails is an error: "stopped" says that everything is saved
            raise
        except Exception:
            await _keep_or_say(parts, progress)
            raise
        if run.save_batches:
            save_batch(parts.run_dir, progress.rollout_step + 1, filled.admission.kept, filled.arrays.advantages)
        progress, record = await learn(parts, progress, filled, phases)
        parts.console.step(record.summary(), done=progress.rollout_step, total=run.rollout_steps)
        del filled, record
        gc_policy.end_step()
    return progress


async def _keep(parts: Parts, progress: Progress) -> None:
    await parts.services.turns.trainer()
    await parts.checkpoints.keep(progress)


async def _keep_or_say(parts: Parts, progress: Progress) -> None:
    """A save that fails while the run ends must not hide why it ends."""
    try:
        await _keep(parts, progress)
    except Exception as error:
        parts.console.note(f"what stood before this step could not be saved: {error}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FilledBatch:
    """N groups, and the trainer's log-probs of their tokens before any update."""

    admission: Admission
    arrays: StepArrays
    old: LogProbs
    gap: Gap


async def fill_batch(parts: Parts, progress: Progress, phases: Phases) -> FilledBatch:
    """Rollouts, verdicts, dynamic sampling and old log-probs of the next rollout step. Changes no weights."""
    config, step, turns = parts.config, progress.rollout_step + 1, parts.services.turns
    groups, colocated = config.algorithm.prompts_per_step, config.run.mode == "colocated"
    with phases.measure("handover"):
        await turns.servers()
    async with LogProbStream(parts.services.trainer, groups=groups, wait=colocated) as stream:
        parts.generator.take_reward_seconds()  # those of the update before belong to no phase
        with phases.measure("rollout"):
            filling = parts.sampler.fill(step, progress.weight_version, stream.add, ahead=groups_ahead(config, step))
            admission = await parts.services.waits.wait_for(
                "batch of groups", "rollout servers", config.run.step_deadline_s, filling, stoppable=True
            )
        phases.move("rollout", "reward", parts.generator.take_reward_seconds())
        with phases.measure("handover"):
            await turns.trainer()
        with phases.measure("logprob"):
            old = await stream.finish()
    if admission.limit_reached:
        parts.console.note(f"step {step}: over-sampling limit reached, training on {len(admission.kept)} groups")
    arrays = step_arrays(admission.kept, config)
    gap = check_mismatch(old, arrays, progress.weight_version, config.monitor, parts.console)
    return FilledBatch(admission=admission, arrays=arrays, old=old, gap=gap)


async def learn(parts: Parts, progress: Progress, filled: FilledBatch, phases: Phases) -> tuple[Progress, StepRecord]:
    """All optimizer steps of one batch, the servers on the new weights, and the step's records and checkpoint."""
    config, step = parts.config, progress.rollout_step + 1
    updates, correction = await _update(parts, filled, step, phases)
    version = progress.weight_version + 1
    with phases.measure("weight_sync"):
        sync = await publish_weights(parts, version)
    close_step(parts, filled.admission, step, progress.weight_version)
    progress = replace(
        progress,
        rollout_step=step,
        optimizer_step=progress.optimizer_step + len(updates),
        weight_version=version,
        sampler=parts.sampler.snapshot(step),
    )
    last = step == config.run.rollout_steps
    evaluation = {}
    if config.evaluation.every and step % config.evaluation.every == 0 and not last:
        # A stop request ends it without an evaluation: saving this step comes first, and the next wait stops again.
        with phases.measure("evaluation"), suppress(StopRequested):
            evaluation = await evaluate(parts, f"step{step}")
    checkpoint = None
    if last or (config.run.checkpoint_every and step % config.run.checkpoint_every == 0):
        with phases.measure("handover"):
            await parts.services.turns.trainer()
        with phases.measure("checkpoint"):
            checkpoint = await parts.checkpoints.begin(progress, wait=last)
    record = StepRecord(
        progress=progress,
        admission=filled.admission,
        arrays=filled.arrays,
        old=filled.old,
        gap=filled.gap,
        correction=correction,
        updates=tuple(updates),
        evaluation=evaluation,
        seconds=phases.seconds(),
        sync=sync,
    )
    write_records(parts, record)
    if checkpoint:  # last: whatever a kill leaves undone before this line is done again, with its records
        await parts.checkpoints.publish(checkpoint)
    return progress, record


async def _update(
    parts: Parts, filled: FilledBatch, step: int, phases: Phases
) -> tuple[list[UpdateMetrics], Correction | None]:
    config, arrays, trainer = parts.config, filled.arrays, parts.services.trainer
    reference = None
    if config.algorithm.kl.coefficient > 0:
        with phases.measure("logprob"):
            reference = await trainer.log_probs(arrays.responses, reference=True)
    correction = step_correction(arrays, filled.old, config)
    with phases.measure("update"):
        batches = mini_batches(
            arrays, filled.old, reference, correction, config, step, hidden_size=parts.inputs.model.hidden_size
        )
        return await trainer.update(batches, parts.objective), correction


def write_records(parts: Parts, record: StepRecord) -> None:
    """The step's line in metrics.jsonl, the alarms that it raises, and its sample responses."""
    line = parts.writer.write(step_metrics(record, parts.config))
    for alarm in parts.health.add(line):
        parts.console.note(f"alarm: {alarm}")
    samples, count = parts.run_dir.path / "samples.jsonl", parts.config.monitor.sample_responses
    write_samples(record, parts.inputs.prompts.prompts, samples, count)


def close_step(parts: Parts, admission: Admission, step: int, version: int) -> None:
    """Write down what was trained, durably."""
    for group in admission.kept:
        parts.ledger.record(
            Event.TRAINED,
            prompt=group.position,
            rollout_step=step,
            weight_version=version,
            generated_by=group.weight_version,
            correct=group.correct,
            tokens=group.tokens,
        )
    parts.ledger.commit()


async def evaluate(parts: Parts, name: str, *, forbid: int | None = None) -> dict[str, Answers]:
    """Held-out answers with the weights that the servers hold now; `forbid`: as Evaluator.run."""
    deadline = parts.config.run.step_deadline_s
    await parts.services.turns.servers()
    return await parts.services.waits.wait_for(
        "held-out answers", "rollout servers", deadline, parts.evaluator.run(name, forbid=forbid), stoppable=True
    )
