"""Functions of an actor on trainer ranks of this machine, with no server and no Ray beside them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import MicroBatchPlan, plan_for_actor
from megatron_dapo.actor.step_data import MiniBatch, Responses
from megatron_dapo.algorithm.policy_loss import Objective
from megatron_dapo.config import Config
from tools.rank_pool import RankPlace, RankPool


def packing(config: Config, responses: Responses) -> MicroBatchPlan:
    """How the actor of `config` packs the responses into micro-batches."""
    hidden_size = HFModelConfig.load(Path(config.model.path)).hidden_size
    return plan_for_actor(responses.sequence_lengths, config.actor, hidden_size=hidden_size)


@dataclass(frozen=True, kw_only=True)
class ActorJob:
    """Functions of an actor, run on processes of this machine."""

    config: Config
    """Its layout says how many processes; every call starts the actor anew."""
    deadline_s: float
    """Seconds of each call."""

    def run(self, ranks: RankPool, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(actor, *args)` returns on rank 0; every rank makes the call.

        `function` stands at module level or is a method of MegatronActor; arguments and result travel pickled.

        Raises:
            RankError: a rank died, raised, or gave no result in time (RankTimeout).
        """
        world_size = self.config.actor.layout.world_size
        return ranks.run(world_size, _on_rank, self, function, args, timeout_s=self.deadline_s)[0]


def _on_rank(place: RankPlace, job: ActorJob, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    config = job.config
    actor = MegatronActor(
        config.actor,
        config.model,
        steps_per_rollout=config.algorithm.mini_batches_per_step,
        seed=config.run.seed,
        timeout_s=job.deadline_s,
        **asdict(place),
    )
    return function(actor, *args)


def loss_and_gradients(
    actor: MegatronActor, mini_batch: MiniBatch, objective: Objective, temperature: float
) -> tuple[float, dict[str, Tensor]] | None:
    """The mini-batch's loss and its gradient, float32 on the CPU, whole, by Hugging Face name, of adapters PEFT's: on
    rank 0; None on the others. Every rank calls. Changes no weight."""
    from megatron_dapo.actor.weights.hf_weights import hf_tensors

    options: dict[str, Any] = {"dtype": torch.float32, "value": attrgetter("main_grad")}
    if actor.optimizer.adapters is not None:
        options["shards"] = actor.optimizer.adapters.shards
    with actor.memory.resident("parameters", "gradients"):
        actor.optimizer.zero_grad()
        sums = actor.passes.backward(mini_batch, objective, temperature, whole_gradients=True)
        tensors = {name: tensor.cpu() for name, tensor in hf_tensors(actor.optimizer.chunks, actor.hf, **options)}
    return (sums["loss"], tensors) if actor.rank == 0 else None
