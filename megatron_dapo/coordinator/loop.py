"""The run, as Algorithm 1 of the paper tells it.

prompts -> ledger -> rollouts -> verdicts -> dynamic sampling -> advantages -> mu updates -> new weights -> servers
"""

from dataclasses import replace

from megatron_dapo.coordinator.batch import mini_batches, step_arrays, step_correction
from megatron_dapo.coordinator.checkpoint import write_checkpoint
from megatron_dapo.coordinator.log_prob_stream import LogProbStream
from megatron_dapo.coordinator.messages import Admission
from megatron_dapo.coordinator.parts import Parts
from megatron_dapo.coordinator.phases import Phases
from megatron_dapo.coordinator.progress import Progress
from megatron_dapo.coordinator.publish import publish_weights
from megatron_dapo.coordinator.step_metrics import StepRecord, check_mismatch, step_metrics, write_samples
from megatron_dapo.data.ledger import Event
from megatron_dapo.monitor.health import new_alarms
from megatron_dapo.monitor.writer import read_metrics


async def train(parts: Parts, progress: Progress) -> Progress:
    """Rollout steps until `run.rollout_steps` are done. Returns where the run then stands."""
    run = parts.config.run
    while progress.rollout_step < run.rollout_steps:
        progress, record = await rollout_step(parts, progress)
        parts.writer.write(step_metrics(record, parts.config))
        for alarm in new_alarms(read_metrics(parts.run_dir.path)):
            parts.console.note(f"alarm: {alarm}")
        write_samples(record, parts.run_dir.path / "samples.jsonl", parts.config.monitor.sample_responses)
        parts.console.step(record.summary(), done=progress.rollout_step, total=run.rollout_steps)
    return progress


async def rollout_step(parts: Parts, progress: Progress) -> tuple[Progress, StepRecord]:
    """One batch of N groups, all its optimizer steps, and the servers on the new weights."""
    config, step, phases = parts.config, progress.rollout_step + 1, Phases()
    deadline = config.run.step_deadline_s

    async with LogProbStream(parts.services.trainer, groups=config.algorithm.prompts_per_step) as stream:
        with phases.measure("rollout"):
            filling = parts.sampler.fill(step, progress.weight_version, stream.add)
            admission = await parts.services.waits.wait_for("batch of groups", "rollout servers", deadline, filling)
        phases.move("rollout", "reward", parts.generator.take_reward_seconds())
        with phases.measure("logprob"):
            old = await stream.finish()
    if admission.limit_reached:
        parts.console.note(f"step {step}: over-sampling limit reached, training on {len(admission.kept)} groups")

    arrays = step_arrays(admission.kept, config)
    reference = None
    if config.algorithm.kl.coefficient > 0:
        with phases.measure("logprob"):
            reference = await parts.services.trainer.log_probs(arrays.responses, reference=True)
    gap = check_mismatch(old, arrays, progress.weight_version, config.monitor, parts.console)
    correction = step_correction(arrays, old, config)

    with phases.measure("update"):
        batches = mini_batches(
            arrays, old, reference, correction, config, step, hidden_size=parts.inputs.model.hidden_size
        )
        updates = await parts.services.trainer.update(batches, parts.objective)

    version = progress.weight_version + 1
    with phases.measure("weight_sync"):
        await publish_weights(parts, version)
    close_step(parts, admission, step, progress.weight_version)
    progress = replace(
        progress,
        rollout_step=step,
        optimizer_step=progress.optimizer_step + len(updates),
        weight_version=version,
        sampler=parts.sampler.state,
    )

    evaluation = {}
    if config.evaluation.every and step % config.evaluation.every == 0 and step < config.run.rollout_steps:
        with phases.measure("evaluation"):
            evaluation = await evaluate(parts, f"step{step}")
    if step == config.run.rollout_steps or (config.run.checkpoint_every and step % config.run.checkpoint_every == 0):
        with phases.measure("checkpoint"):
            await write_checkpoint(parts, progress)
    record = StepRecord(
        progress=progress,
        admission=admission,
        arrays=arrays,
        old=old,
        gap=gap,
        correction=correction,
        updates=tuple(updates),
        evaluation=evaluation,
        seconds=phases.seconds(),
    )
    return progress, record


def close_step(parts: Parts, admission: Admission, step: int, version: int) -> None:
    """Write down what was trained, durably."""
    for group in admission.kept:
        parts.services.ledger.record(
            Event.TRAINED,
            prompt=group.position,
            rollout_step=step,
            weight_version=version,
            generated_by=group.weight_version,
            correct=group.correct,
            tokens=group.tokens,
        )
    parts.services.ledger.commit()


async def evaluate(parts: Parts, name: str) -> dict:
    """Held-out answers with the weights that the servers hold now."""
    deadline = parts.config.run.step_deadline_s
    return await parts.services.waits.wait_for(
        "held-out answers", "rollout servers", deadline, parts.evaluator.run(name)
    )
