"""The whole plan of a config: does it fit, how long does it take."""

from dataclasses import dataclass
from typing import Literal

from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.plan.calibration import Calibration
from megatron_dapo.plan.lengths import Workload, highest_pass_rate
from megatron_dapo.plan.memory import (
    PHASES,
    RankMemory,
    ServerMemory,
    host_memory,
    server_memory,
    trainer_memory,
)
from megatron_dapo.plan.step import Servers, StepPlan, plan_step
from megatron_dapo.plan.sync import server_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """What the user may set instead of the calibration's and the config's values."""

    gpu_memory: float | None = None
    mean_response: float | None = None
    sigma: float | None = None
    pass_rate: float | None = None


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

    ranks: list[RankMemory]
    server: ServerMemory | None
    """None where `rollout.urls` names servers that someone else runs."""

    servers: Servers
    shared: bool
    """Trainer and servers are on the same GPUs, in turns."""

    gpu_memory: float
    misfits: list[Misfit]
    workload: Workload
    step: StepPlan | None
    """None where something does not fit."""

    host: dict[str, float]

    @property
    def fits(self) -> bool:
        """Nothing exceeds the GPUs."""
        return not self.misfits

    def gpu_hours(self, rollout_steps: int) -> float:
        """Of the whole run."""
        assert self.step is not None
        return self.step.seconds * rollout_steps * self.step.gpus / 3600


def make_plan(
    config: Config, hf: HFModelConfig, constants: Calibration, assumed: Assumptions | None = None, *, steps: int = 2
) -> Plan:
    """Memory of everything, and time if it fits.

    Raises:
        ConfigError: the layout does not divide the model, or an assumption is impossible.
    """
    assumed = assumed or Assumptions()
    check_layout(hf, config.actor.layout)
    workload = workload_of(config, constants, assumed)
    gpu_memory = assumed.gpu_memory or constants.gpu_memory
    servers = Servers(
        count=len(config.rollout.urls) or config.rollout.servers, tensor_parallel=config.rollout.tensor_parallel
    )
    if hf.num_attention_heads % servers.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel = {servers.tensor_parallel}: must divide the model's num_attention_heads = "
            f"{hf.num_attention_heads}"
        )
    shared = share_gpus(config)
    ranks = trainer_memory(config, hf, constants)
    server = server_memory(config, hf, constants, gpu_memory)
    misfits = find_misfits(config, hf, constants, gpu_memory)
    gpus = config.actor.layout.world_size + (0 if shared else servers.gpus)
    step = None
    if not misfits:
        state = max((rank.state for rank in ranks), key=lambda one: one.total)
        step = plan_step(
            config, hf, constants, workload, servers=servers, memory=server, state=state, gpus=gpus, steps=steps
        )
    mean = (step.mean_length if step else min(workload.mean_response, workload.longest)) + workload.mean_prompt
    return Plan(
        ranks=ranks,
        server=None if config.rollout.urls else server,
        servers=servers,
        shared=shared,
        gpu_memory=gpu_memory,
        misfits=misfits,
        workload=workload,
        step=step,
        host=host_memory(config, hf, constants, mean),
    )


def workload_of(config: Config, constants: Calibration, assumed: Assumptions) -> Workload:
    """Lengths and pass rate: the user's, or else the calibration's and `initial_pass_rate`."""
    group = config.algorithm.group_size
    most = highest_pass_rate(group)
    rate = assumed.pass_rate or config.algorithm.dynamic_sampling.initial_pass_rate
    if not 0 < rate < 1:
        raise ConfigError(f"pass rate {rate:g}: must be above 0 and below 1; give --pass-rate")
    return Workload(
        mean_response=assumed.mean_response or constants.mean_response,
        sigma=constants.response_sigma if assumed.sigma is None else assumed.sigma,
        difficulty_share=constants.difficulty_share,
        mean_prompt=min(constants.mean_prompt, config.data.max_prompt_tokens),
        pass_rate=min(rate, most),
        longest=config.rollout.max_new_tokens,
        group_size=group,
    )


def share_gpus(config: Config) -> bool:
    """`run.mode: colocated`. And one trainer rank and one server of one GPU: they take turns on the same one, if a
    machine has no other."""
    rollout = config.rollout
    if config.run.mode == "colocated":
        return True
    return not rollout.urls and config.actor.layout.world_size == rollout.servers * rollout.tensor_parallel == 1


def find_misfits(config: Config, hf: HFModelConfig, constants: Calibration, gpu_memory: float) -> list[Misfit]:
    """What needs more of a GPU than there is, the trainer's pipeline stages first."""
    server = server_memory(config, hf, constants, gpu_memory)
    room = dict.fromkeys(PHASES, gpu_memory)
    if share_gpus(config):  # beside the server
        room = dict.fromkeys(PHASES, gpu_memory * (1 - config.rollout.memory_fraction))
    if config.run.mode == "colocated":  # the server has left when the trainer works, but for its framework
        room = dict.fromkeys(PHASES, gpu_memory - constants.framework_memory) | {"rollout": room["rollout"]}
    found = []
    for rank in trainer_memory(config, hf, constants):
        phase, peak = max(rank.peaks.items(), key=lambda one: one[1] - room[one[0]])
        there = room[phase]
        if peak > there:
            found.append(Misfit(part="trainer", what=f"pipeline stage {rank.stage}, {phase}", needed=peak, there=there))
    if config.rollout.urls:
        return found
    longest = config.model.context_length * server.kv_bytes_per_token
    if server.kv_cache < longest:
        held = config.rollout.memory_fraction * gpu_memory
        what = "weights and the KV cache of one response of full length"
        found.append(Misfit(part="server", what=what, needed=server.weights + longest, there=held))
    buckets = server_bytes(config, hf)
    if buckets and constants.framework_memory + buckets > server.rest:
        what = "framework and two sync buckets, outside memory_fraction"
        needed = constants.framework_memory + buckets
        found.append(Misfit(part="server", what=what, needed=needed, there=server.rest))
    return found
