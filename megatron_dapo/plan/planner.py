"""The whole plan of a config: what fits, what does not, and how long it takes."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from megatron_dapo.actor.model.hf_config import check_actor, check_blocks
from megatron_dapo.config import ConfigError
from megatron_dapo.config.actor_config import Recompute
from megatron_dapo.plan.memory import PHASES, RankMemory, ServerMemory, host_memory, server_memory, trainer_memory
from megatron_dapo.plan.rollout import RolloutStep, groups
from megatron_dapo.plan.scenario import Scenario, share_gpus
from megatron_dapo.plan.step_plan import StepPlan, plan_step, rollouts
from megatron_dapo.plan.sync import server_bytes
from megatron_dapo.plan.trainer_time import update_time

SPARE = 0.05
"""Of a GPU: more than the figures here are off by (docs/measurements/symbolic.md)."""


_PARTS: list[Recompute] = [("layernorm",), ("moe",), ("layernorm", "moe")]
"""Of layers with experts; under routing replay the first alone (`check_actor`)."""


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

    nodes: int
    """Of a server that the run starts."""

    misfits: list[Misfit]
    step: StepPlan | None
    """None where something does not fit."""

    host: dict[str, float]

    @property
    def gpu_hours(self) -> float:
        """Of the whole run."""
        assert self.step is not None
        return self.step.seconds * self.case.config.run.rollout_steps * self.step.gpus / 3600

    def tree(self) -> dict[str, Any]:
        """As JSON holds it: bytes, seconds, tokens."""
        derived = {name: getattr(self.step, name, None) for name in ("seconds", "tokens_per_s_per_gpu")}
        return {
            "fits": not self.misfits,
            "gpu_memory": self.case.constants.gpu_memory,
            "trainer": [asdict(rank) | {"peaks": rank.peaks} for rank in self.ranks],
            "server": self.server and asdict(self.server),
            "host": self.host,
            "misfits": [asdict(misfit) for misfit in self.misfits],
            "workload": asdict(self.case.workload),
            "step": self.step and asdict(self.step) | derived | {"gpu_hours": self.gpu_hours},
        }


def make_plan(case: Scenario, *, steps: int = 2, filled: Sequence[RolloutStep] = ()) -> Plan:
    """Memory of everything, and time if it fits.

    Args:
        steps: rollout steps that are simulated, unless `filled` has them.

    Raises:
        ConfigError: the layout does not divide the model, a server has no place, or an assumption is impossible.
    """
    check_actor(case.hf, case.config.actor)
    if case.config.run.mode == "colocated" and not case.config.rollout.urls:
        case.config.check_shared_gpus()
    workload, heads, parallel = case.workload, case.hf.num_attention_heads, case.config.rollout.tensor_parallel
    if heads % parallel:
        raise ConfigError(f"rollout.tensor_parallel = {parallel}: must divide the model's {heads} attention heads")
    check_blocks(case.hf, case.config.rollout.quantization, parallel)
    nodes = 1 if case.config.rollout.urls else case.config.nodes_of_server(int(case.constants.gpus_per_node))
    ranks, server, misfits = trainer_memory(case), server_memory(case), find_misfits(case)
    step = None if misfits else plan_step(case, filled or rollouts(case, server, steps=steps))
    mean = (step.mean_length if step else min(workload.mean_response, workload.longest)) + workload.mean_prompt
    own_server, host = None if case.config.rollout.urls else server, host_memory(case, mean)
    return Plan(case=case, ranks=ranks, server=own_server, nodes=nodes, misfits=misfits, step=step, host=host)


def find_misfits(case: Scenario) -> list[Misfit]:
    """What needs more of a GPU than there is, the trainer's pipeline stages first."""
    config, framework = case.config, case.constants.framework_memory
    server, room, found = server_memory(case), trainer_room(case), []
    for rank in trainer_memory(case):
        phase, peak = max(rank.peaks.items(), key=lambda one: one[1] - room[one[0]])
        what = f"pipeline stage {rank.stage}, {phase}"
        found.append(Misfit(part="trainer", what=what, needed=peak, there=room[phase]))
    if not config.rollout.urls:
        longest = server.weights + config.model.context_length * server.kv_bytes_per_token
        what, there = "weights and the KV cache of one response of full length", server.weights + server.kv_cache
        found.append(Misfit(part="server", what=what, needed=longest, there=there))
        parts = {"weight sync": server_bytes(case), "the output layer in float32": server.head}
        if outside := sum(parts.values()):  # the framework alone is a guess
            what = " and ".join(["framework", *(name for name, needed in parts.items() if needed)])
            what, outside = f"{what}, outside memory_fraction", framework + outside
            found.append(Misfit(part="server", what=what, needed=outside, there=server.rest))
    return [one for one in found if one.needed > one.there]


def trainer_room(case: Scenario) -> dict[str, float]:
    """Bytes that a trainer rank may have, by phase."""
    gpu, takes_turns = case.constants.gpu_memory, case.config.run.mode == "colocated"
    beside = gpu * (1 - case.config.rollout.memory_fraction) if share_gpus(case.config) else gpu
    # A server that takes turns has left when the trainer works, but for its framework.
    stays = case.constants.framework_memory if takes_turns else 0.0
    return dict.fromkeys(PHASES, (gpu if takes_turns else beside) - stays) | {"rollout": beside - stays}


def least_recompute(case: Scenario) -> Recompute:
    """What costs an update least of none, a number of layers, full, and parts of every layer, with which it leaves
    `SPARE` of a GPU; full where nothing does. Parts are those of layers of TransformerEngine."""
    layout, room = case.config.actor.layout, (1 - SPARE) * trainer_room(case)["update"]
    chunk = case.hf.num_layers // (layout.pipeline * (layout.virtual_pipeline or 1))
    amounts: list[Recompute] = ["none", *range(1, chunk), "full"]
    parts: list[Recompute] = _PARTS[: 1 if case.config.actor.routing_replay else 3] if case.hf.experts else [("mlp",)]
    lengths = np.array(next(groups(case.workload, seed=0)).lengths) + round(case.workload.mean_prompt)

    def fits(amount: Recompute) -> bool:
        return all(rank.peaks["update"] <= room for rank in trainer_memory(case.changed({"actor.recompute": amount})))

    def seconds(amount: Recompute) -> float:
        one = case.changed({"actor.recompute": amount})
        return update_time(one, lengths, trainer_memory(one)[0].state).seconds

    least = amounts[min(bisect_left(amounts, True, key=fits), chunk)]
    return least if least == "none" else min([least, *filter(fits, parts)], key=seconds)
