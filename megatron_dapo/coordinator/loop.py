"""The run, as Algorithm 1 of the paper tells it.

prompts -> ledger -> rollouts -> verdicts -> dynamic sampling -> advantages -> mu updates -> new weights -> servers
"""

import asyncio
import gc
from dataclasses import replace

from megatron_dapo.cluster.waits import StopRequested
from megatron_dapo.coordinator.batch import FilledBatch, LogProbStream, entropy_weight, filled_batch, update_actor
from megatron_dapo.coordinator.checkpoints import Progress, reset_reference
from megatron_dapo.coordinator.publish import publish_weights
from megatron_dapo.coordinator.run_context import RunContext
from megatron_dapo.coordinator.sampler import groups_ahead
from megatron_dapo.coordinator.step_metrics import step_metrics, write_records
from megatron_dapo.experience.generator import BatchCounter
from megatron_dapo.monitor.statistics import Answers
from megatron_dapo.monitor.timeline import StepTimer


async def train(context: RunContext, progress: Progress) -> Progress:
    """Rollout steps until `run.rollout_steps` are done. Returns where the run then stands."""
    total = context.config.run.rollout_steps
    while progress.rollout_step < total:
        timer = context.timeline.begin(progress.rollout_step + 1)
        async with context.checkpoints.kept_on_failure(progress, context.sampler.under_way):
            batch = await fill_batch(context, progress, timer)
        progress, metrics = await learn(context, progress, batch, timer)
        context.console.step(metrics, total=total)
        del batch
        gc.collect()  # between two steps: within one, `tune_collector` (run.py) keeps the collector from it
    return progress


async def fill_batch(context: RunContext, progress: Progress, timer: StepTimer) -> FilledBatch:
    """Rollouts, verdicts, dynamic sampling and old log-probs of the next rollout step. Changes no weights."""
    step = progress.rollout_step + 1
    config = context.config.at_step(step)
    async with LogProbStream(context.trainer, config, context.waits.lose) as stream:
        with timer.measure("handover"):
            await context.handover.to_servers()
        context.generator.take_seconds()  # those of the update before belong to no phase
        with timer.measure("rollout"):
            ahead, deadline = groups_ahead(config, step), config.run.step_deadline_s
            counter = BatchCounter(context.generator, context.fleet, config.algorithm.prompts_per_step, stream.add)
            hold = config.run.mode == "colocated" or step == config.run.rollout_steps
            filling = context.sampler.fill(step, progress.weight_version, counter.keep, ahead=ahead, hold=hold)
            admission = await context.waits.wait_for(
                "batch of groups", "rollout servers", deadline, filling, stoppable=True, count=counter.count
            )
        for phase, seconds in context.generator.take_seconds().items():
            timer.move("rollout", phase, seconds)
        with timer.measure("handover"):
            await context.handover.to_trainer()
        with timer.measure("logprob"):
            old = await stream.finish()
    if admission.limit_reached:
        context.console.note(f"step {step}: over-sampling limit reached, training on {len(admission.kept)} groups")
    return filled_batch(admission, old, config, progress.weight_version)


async def learn(
    context: RunContext, progress: Progress, batch: FilledBatch, timer: StepTimer
) -> tuple[Progress, dict[str, float | int]]:
    """All optimizer steps of one batch, the servers on the new weights, the step's checkpoint and its metrics."""
    run, step, version = context.config.run, progress.rollout_step + 1, progress.weight_version + 1
    weight, coefficient = entropy_weight(context.config.algorithm, progress.entropy_coefficient, batch)
    config, hidden = context.config.at_step(step), context.inputs.model.hidden_size
    config = replace(config, algorithm=replace(config.algorithm, entropy_coefficient=weight))
    async with context.checkpoints.kept_on_failure(progress, context.sampler.under_way, updating=True):
        updates, correction = await update_actor(context.trainer, config, batch, step, timer, hidden)
        reset = await reset_reference(context.trainer, context.run_dir, context.config.algorithm.kl, step, timer)
        with timer.measure("weight_sync"):
            sync = await publish_weights(context, version)
    await context.sampler.refresh()
    context.sampler.record_trained(batch.admission.kept, step, progress.weight_version)
    progress = replace(
        progress,
        rollout_step=step,
        optimizer_step=progress.optimizer_step + len(updates),
        weight_version=version,
        sampler=context.sampler.snapshot(step),
        entropy_coefficient=coefficient,
        reference_step=step if reset else progress.reference_step,
    )
    last, every = step == run.rollout_steps, context.config.evaluation.every
    evaluation: dict[str, Answers] = {}
    publish_checkpoint = None
    failure: Exception | None = None
    if every and step % every == 0 and not last:
        # Saving this step comes first: after a stop request the next wait stops again, an error is raised below.
        with timer.measure("evaluation"):
            try:
                evaluation = await context.evaluate(f"step{step}")
            except Exception as error:
                failure = None if isinstance(error, StopRequested) else error
                context.console.note(f"the evaluation of step {step} ended without a result {error}".rstrip())
    if context.checkpoints.due(step) or last or failure:
        with timer.measure("handover"):
            await context.handover.to_trainer()
        with timer.measure("checkpoint"):
            publish_checkpoint = await context.checkpoints.begin(progress, wait=last or failure is not None)
    about = progress, batch, correction, updates, evaluation, timer.seconds(), sync
    # Not in the event loop: of long responses it takes seconds, and servers are to be heard.
    metrics = await asyncio.to_thread(step_metrics, context.config, *about)
    metrics |= context.fleet.statistics.take()
    if coefficient is not None:
        metrics["entropy_coefficient"] = weight
    write_records(context, metrics, batch)
    if publish_checkpoint:  # last: after a kill before this line the step is done again, with its records
        await publish_checkpoint()
    if failure:
        raise failure
    return progress, metrics
