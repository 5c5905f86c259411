"""One rollout step in seconds, and the run in GPU-hours.

Phases follow `coordinator.loop`: the servers fill the batch while the trainer takes old log-probs of what is already
kept; then the optimizer steps; then the new weights to the servers. Evaluation, checkpoints and the
start of the run are not counted; verdicts are taken to be judged while the servers write.

By `run.mode`: in `sync` one phase follows the other (what a surplus draws during the updates is counted in the next
rollout). In `colocated` all log-probs come after the rollout, and both
sides move between GPU and host memory. In `async` the servers never wait for the trainer, nor for the slowest response
of a batch: the step takes as long as the slower side, with what of the sync stops it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean

import numpy as np

from megatron_dapo.plan.memory import ServerMemory, server_memory, trainer_memory
from megatron_dapo.plan.rank_state import StateBytes, expert_parameters
from megatron_dapo.plan.rollout import Fleet, RolloutStep, fill_batches, groups, mean_running_context
from megatron_dapo.plan.scenario import Scenario, share_gpus
from megatron_dapo.plan.sync import sends, sync_seconds
from megatron_dapo.plan.trainer_time import PassTime, forward_flops, log_prob_time, matrix_parameters, update_time

WARM_STEPS = 1
"""Simulated before those that count: the first one has nothing carried over and knows no pass rate."""

LOG_PROB_PARTS = 8
"""As `coordinator.old_log_probs.CHUNKS`; a test compares."""

_SAMPLED_GROUPS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """A rollout step, mean of those simulated."""

    rollout_s: float
    tail_s: float
    """Part of `rollout_s` in which fewer than half as many responses run as could."""

    log_prob_s: float
    """What of it is left when the rollout is over."""

    log_prob_total_s: float
    update_s: float
    update: PassTime
    """Of one optimizer step: the mean."""

    optimizer_steps: float
    sync_s: float
    stopped_s: float
    """For which the sync stops a server."""
    handover_s: float
    """`colocated`: servers' weights and trainer's state to host memory and back."""

    overlaps: bool
    """`async`: servers and trainer work at the same time."""

    generated_tokens: float
    trained_tokens: float
    generated_groups: float
    kept_groups: float
    """Fewer than asked for: the limit of over-sampling came first."""

    mean_length: float
    """Trained response tokens."""

    cut_off: float
    """Share of the trained responses that reach `rollout.max_new_tokens`."""

    slots: int
    """Responses that run at once, over all servers."""

    gpus: int
    mfu: float
    """Model FLOPs of log-probs and updates over what the trainer's GPUs could do in those seconds."""

    @property
    def seconds(self) -> float:
        """From batch to batch."""
        training = self.log_prob_s + self.update_s
        if self.overlaps:
            return max(self.rollout_s - self.tail_s + self.stopped_s, training + self.sync_s)
        return self.rollout_s + training + self.sync_s + self.handover_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Trained prompt-less tokens over the whole step and all GPUs."""
        return self.trained_tokens / self.seconds / self.gpus


def rollouts(case: Scenario, memory: ServerMemory, *, steps: int = 2) -> list[RolloutStep]:
    """`steps` rollout steps, simulated after `WARM_STEPS`; `memory`, of one GPU of a server, says how many responses
    fit. Of the trainer nothing matters here."""
    # In async mode what is left when a batch is full belongs to the tail, which the training hides.
    interrupts = case.config.run.mode != "async" and not case.config.rollout.deterministic
    source, fleet = groups(case.workload, seed=0), fleet_of(case, memory)
    return fill_batches(case.config.algorithm, fleet, source, WARM_STEPS + steps, interrupts=interrupts)[WARM_STEPS:]


def plan_step(case: Scenario, filled: Sequence[RolloutStep], *, every: int = 1) -> StepPlan:
    """Time of a rollout step in the long run.

    Args:
        filled: as `rollouts` gives them: averaged.
        every: of so many parts of the log-probs, or optimizer steps, one is calculated and stands for all.
    """
    config, steps = case.config, len(filled)
    state = max((rank.state for rank in trainer_memory(case)), key=lambda one: one.total)
    passes = [_passes(case, one.lengths, state, every) for one in filled]
    whole = [sum(part.seconds for part in parts) for parts, _ in passes]
    # The last part of the batch is known only at its end. A trainer that shares the servers' GPUs does all of it then,
    # and so does one whose batch was written while it trained on the one before.
    each = zip(filled, whole, passes, strict=True)
    left = [max(parts[-1].seconds, total - one.seconds) for one, total, (parts, _) in each]
    updates = [update for _, own in passes for update in own]
    update_s = sum(update.seconds for update in updates)
    reference_s = fmean(whole) if config.algorithm.kl.coefficient > 0 else 0.0  # of the whole batch, once it is full
    flops = sum(one.flops for parts, own in passes for one in (*parts, *own))
    lengths = np.concatenate([one.lengths for one in filled])
    return StepPlan(
        rollout_s=fmean(one.seconds for one in filled),
        tail_s=fmean(one.tail_s for one in filled),
        log_prob_s=fmean(whole if share_gpus(config) or config.run.mode == "async" else left) + reference_s,
        log_prob_total_s=fmean(whole) + reference_s,
        update_s=update_s / steps,
        update=PassTime(**{one.name: fmean(getattr(each, one.name) for each in updates) for one in fields(PassTime)}),
        optimizer_steps=len(updates) / steps,
        sync_s=sync_seconds(case),
        stopped_s=sync_seconds(case) / sends(case),
        handover_s=handover_seconds(case, server_memory(case), state),
        overlaps=config.run.mode == "async",
        generated_tokens=fmean(one.tokens for one in filled),
        trained_tokens=lengths.sum() / steps,
        generated_groups=fmean(one.groups for one in filled),
        kept_groups=fmean(len(one.kept) for one in filled),
        mean_length=float(lengths.mean()),
        cut_off=float((lengths >= case.workload.longest).mean()),
        slots=filled[0].fleet.slots,
        gpus=case.gpus,
        mfu=flops / ((sum(whole) + update_s) * config.actor.layout.world_size * case.constants.peak_flops),
    )


def _passes(case: Scenario, drawn: np.ndarray, state: StateBytes, every: int) -> tuple[list[PassTime], list[PassTime]]:
    """(log-probs, part by part; optimizer steps) over a batch."""
    sequences = drawn + round(case.workload.mean_prompt)
    parts = [log_prob_time(case, part) for part in np.array_split(sequences, LOG_PROB_PARTS)[::every]]
    sequences = np.random.default_rng(0).permutation(sequences)
    size = case.config.algorithm.mini_batch_responses
    batches = [sequences[start : start + size] for start in range(0, len(sequences), size)]
    steps = [update_time(case, batch, state) for batch in batches[::every]]
    repeated = ([one for one in each for _ in range(every)] for each in (parts, steps))
    return next(repeated)[:LOG_PROB_PARTS], next(repeated)[: len(batches)]


def fleet_of(case: Scenario, memory: ServerMemory) -> Fleet:
    """The servers as one: what limits a decode step and how many responses run."""
    hf, constants, workload, count = case.hf, case.constants, case.workload, case.servers
    sample = groups(workload, seed=1)
    lengths = np.array([length for _ in range(_SAMPLED_GROUPS) for length in next(sample).lengths])
    mean_context = mean_running_context(lengths, workload.mean_prompt)
    each = max(1, min(case.config.rollout.max_running_requests, int(memory.kv_tokens / mean_context)))
    bandwidth = constants.memory_bandwidth * constants.decode_efficiency
    reductions = 2 * hf.num_layers if case.config.rollout.tensor_parallel > 1 else 0
    overhead = constants.decode_overhead + reductions * constants.decode_reduce_latency
    prefill = forward_flops(hf, np.array([workload.mean_prompt])).item()
    speed = constants.peak_flops * constants.prefill_efficiency * case.config.rollout.tensor_parallel
    experts = expert_parameters(hf) * case.projection_bytes / case.config.rollout.tensor_parallel
    missed = 1 - hf.experts.top_k / hf.experts.count if hf.experts else 0.0  # of the experts, by one response
    rest = memory.weights - experts + memory.head  # the float32 copy of the output layer's weight is written and read
    response_s = 2 * matrix_parameters(hf) / speed
    head_s = 2 * case.head_parameters / (speed * constants.float32_flops / constants.peak_flops)

    def step_s(running: int, context: float) -> float:
        own = running / count  # of one server; its output layer in float32 comes after all else
        read = rest + experts * (1 - missed**own) + memory.kv_bytes_per_token * context / count
        return overhead + max(read / bandwidth, response_s * own) + head_s * own

    prefill_s = prefill / speed / count
    return Fleet(slots=count * each, mean_prompt=workload.mean_prompt, prefill_s=prefill_s, step_s=step_s)


def handover_seconds(case: Scenario, memory: ServerMemory, state: StateBytes) -> float:
    """Out and in again, once a step: a server's weights; the trainer's, twice (log-probs, then update), and what the
    optimizer has."""
    if case.config.run.mode != "colocated":
        return 0.0
    actor, optimizer = case.config.actor, state.master_weights + state.moments
    offload = actor.offload
    moved = memory.weights + (0 if offload.optimizer_state or actor.optimizer.on_cpu else optimizer)
    if offload.between_phases == "all":
        moved += 2 * state.parameters
    return 2 * moved / case.constants.host_bandwidth
