"""The whole plan of a config: does it fit, how long does it take, and what to change where it does not fit."""

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_dapo.actor.model.hf_config import check_actor
from megatron_dapo.config import ConfigError
from megatron_dapo.config.actor_config import Recompute
from megatron_dapo.config.root import contradictions
from megatron_dapo.plan.memory import PHASES, RankMemory, ServerMemory, host_memory, server_memory, trainer_memory
from megatron_dapo.plan.rollout import RolloutStep
from megatron_dapo.plan.scenario import Changes, Scenario, share_gpus
from megatron_dapo.plan.step_plan import StepPlan, plan_step, rollouts
from megatron_dapo.plan.sync import server_bytes

LARGEST_PIPELINE = 16
SPARE = 0.05
"""Of a GPU: more than the figures here are off by (docs/measurements/symbolic.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """Something that does not fit."""

    part: Literal["trainer", "server"]
    what: str
    needed: float
    """Bytes."""

    there: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that is printed."""

    case: Scenario
    ranks: list[RankMemory]
    server: ServerMemory | None
    """None where `rollout.urls` names servers that someone else runs."""

    misfits: list[Misfit]
    step: StepPlan | None
    """None where something does not fit."""

    host: dict[str, float]
    recompute: Recompute
    """What `actor.recompute` needs to be, at least."""

    @property
    def fits(self) -> bool:
        """Nothing exceeds the GPUs."""
        return not self.misfits

    @property
    def gpu_hours(self) -> float:
        """Of the whole run."""
        assert self.step is not None
        return self.step.seconds * self.case.config.run.rollout_steps * self.step.gpus / 3600


def make_plan(case: Scenario, *, steps: int = 2, filled: Sequence[RolloutStep] = ()) -> Plan:
    """Memory of everything, and time if it fits.

    Args:
        steps: rollout steps that are simulated, unless `filled` has them.

    Raises:
        ConfigError: the layout does not divide the model, or an assumption is impossible.
    """
    check_actor(case.hf, case.config.actor)
    workload, heads, parallel = case.workload, case.hf.num_attention_heads, case.config.rollout.tensor_parallel
    if heads % parallel:
        raise ConfigError(
            f"rollout.tensor_parallel = {parallel}: must divide the model's num_attention_heads = {heads}"
        )
    ranks, server, misfits = trainer_memory(case), server_memory(case), find_misfits(case)
    step = None
    if not misfits:
        state = max((rank.state for rank in ranks), key=lambda one: one.total)
        step = plan_step(case, server, state, filled or rollouts(case, server, steps=steps))
    mean = (step.mean_length if step else min(workload.mean_response, workload.longest)) + workload.mean_prompt
    own_server, host = None if case.config.rollout.urls else server, host_memory(case, mean)
    least = least_recompute(case)
    return Plan(case=case, ranks=ranks, server=own_server, misfits=misfits, step=step, host=host, recompute=least)


def find_misfits(case: Scenario) -> list[Misfit]:
    """What needs more of a GPU than there is, the trainer's pipeline stages first."""
    config, gpu_memory, framework = case.config, case.constants.gpu_memory, case.constants.framework_memory
    server, room, found = server_memory(case), _trainer_room(case), []
    for rank in trainer_memory(case):
        phase, peak = max(rank.peaks.items(), key=lambda one: one[1] - room[one[0]])
        if peak > room[phase]:
            what = f"pipeline stage {rank.stage}, {phase}"
            found.append(Misfit(part="trainer", what=what, needed=peak, there=room[phase]))
    if config.rollout.urls:
        return found
    longest = config.model.context_length * server.kv_bytes_per_token
    if server.kv_cache < longest:
        held = config.rollout.memory_fraction * gpu_memory
        what = "weights and the KV cache of one response of full length"
        found.append(Misfit(part="server", what=what, needed=server.weights + longest, there=held))
    parts = {"two sync buckets": server_bytes(case), "the output layer in float32": server.head}
    outside = framework + sum(parts.values())
    if outside > framework and outside > server.rest:
        what = " and ".join(["framework", *(name for name, needed in parts.items() if needed)])
        found.append(Misfit(part="server", what=f"{what}, outside memory_fraction", needed=outside, there=server.rest))
    return found


def headroom(case: Scenario) -> float:
    """Bytes of a GPU that the trainer leaves free where it needs most; negative: it does not fit."""
    room = _trainer_room(case)
    return min(room[phase] - peak for rank in trainer_memory(case) for phase, peak in rank.peaks.items())


def _trainer_room(case: Scenario) -> dict[str, float]:
    """Bytes that a trainer rank may have, by phase."""
    gpu, beside_server = case.constants.gpu_memory, 1 - case.config.rollout.memory_fraction
    room = dict.fromkeys(PHASES, gpu * (beside_server if share_gpus(case.config) else 1))
    if case.config.run.mode == "colocated":  # the server has left when the trainer works, but for its framework
        room = dict.fromkeys(PHASES, gpu - case.constants.framework_memory) | {"rollout": room["rollout"]}
    return room


def remedies(case: Scenario) -> list[Changes]:
    """The least that makes it fit: what costs time only, else more GPUs. Nothing: no such change is known.

    First the trainer's, then the servers' way with the trainer's taken: two are meant together, since both may share
    GPUs. Of one that would not help without breaking the other nothing is said.
    """

    def misfits(other: Scenario) -> set[str]:
        return {one.part for one in find_misfits(other)}

    now = misfits(case)
    found: list[Changes] = []
    for part, ways in (("trainer", _trainer_ways(case)), ("server", _server_ways(case))):
        if part in now:
            way = next((way for way in ways if misfits(case.changed(way)) <= now - {part}), None)
            if way is not None:
                if "actor.recompute" in way:
                    way = {**way, "actor.recompute": least_recompute(case.changed(way))}
                found.append(way)
                case, now = case.changed(way), now - {part}
    return found


def least_recompute(case: Scenario) -> Recompute:
    """What costs least of none, a number of layers and full, with which an update leaves `SPARE` of a GPU; full where
    nothing does."""
    layout, room = case.config.actor.layout, (1 - SPARE) * _trainer_room(case)["update"]
    chunk = case.hf.num_layers // (layout.pipeline * (layout.virtual_pipeline or 1))
    amounts: list[Recompute] = ["none", *range(1, chunk), "full"]

    def fits(amount: Recompute) -> bool:
        return all(rank.peaks["update"] <= room for rank in trainer_memory(case.changed({"actor.recompute": amount})))

    return amounts[min(bisect_left(amounts, True, key=fits), chunk)]


def _trainer_ways(case: Scenario) -> Iterator[Changes]:
    actor, context, share = case.config.actor, case.config.model.context_length, case.config.rollout.memory_fraction
    if share_gpus(case.config):  # the server can be given less of it
        yield {"rollout.memory_fraction": round(share / 2, 2)}
    budgets = [{}] if actor.micro_batch_tokens <= context else [{}, {"actor.micro_batch_tokens": context}]
    recomputes: list[dict[str, Any]] = [{}] if actor.recompute == "full" else [{}, {"actor.recompute": "full"}]
    if not actor.offload.optimizer_state:
        recomputes.append(recomputes[-1] | {"actor.offload.optimizer_state": True})
    fused = [{}] if actor.fused_linear_log_prob else [{}, {"actor.fused_linear_log_prob": True}]
    sizes = (2**power for power in range(1, 7) if 2**power > actor.layout.expert)
    more = [way for size in sizes if possible(case.changed(way := {"actor.layout.expert": size}))]  # on the same GPUs
    for parts in itertools.product([{}, *more, *_larger_layouts(case)], budgets, recomputes, fused):
        yield {key: value for part in parts for key, value in part.items()}


def _larger_layouts(case: Scenario) -> Iterator[dict[str, Any]]:
    """Larger tensor- and pipeline-parallel sizes that divide the model, few GPUs first, tensor parallel first."""
    now = case.config.actor.layout
    tensors = [size for size in (1, 2, 4, 8) if size >= now.tensor]
    pipelines = range(now.pipeline, LARGEST_PIPELINE + 1)
    for tensor, pipeline in sorted(itertools.product(tensors, pipelines), key=lambda one: (one[0] * one[1], -one[0])):
        sizes = {"tensor": tensor, "pipeline": pipeline, "sequence_parallel": tensor > 1}
        changes = {f"actor.layout.{name}": size for name, size in sizes.items() if size != getattr(now, name)}
        if (tensor, pipeline) != (now.tensor, now.pipeline) and possible(case.changed(changes)):
            yield changes


def _server_ways(case: Scenario) -> list[Changes]:
    now = case.config.rollout
    ways: list[Changes] = [] if now.kv_cache_tokens is None else [{"rollout.kv_cache_tokens": None}]
    ways += [{"rollout.memory_fraction": 0.85}] if now.memory_fraction < 0.85 else []
    ways += [{"rollout.tensor_parallel": size} for size in (2, 4, 8) if size > now.tensor_parallel]
    if case.weight_sync == "distributed":
        ways += [{"rollout.sync_bucket_mb": size} for size in (1024, 256) if size < now.sync_bucket_mb]
        ways.append({"rollout.weight_sync": "disk"})
    return ways


def possible(case: Scenario) -> bool:
    """Whether the model can be cut so, and no keys contradict each other."""
    try:
        check_actor(case.hf, case.config.actor)
    except ConfigError:
        return False
    return not list(contradictions(case.config))
