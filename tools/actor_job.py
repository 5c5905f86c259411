"""Functions of an actor on trainer ranks of this machine, with no server and no Ray beside them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import MicroBatchPlan, plan_for_actor
from megatron_dapo.actor.step_data import Responses
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
