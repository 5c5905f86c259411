"""An actor of one rank with a random mini-batch, for measurements; and how a measured ratio is shown."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import numpy as np

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.step_data import MiniBatch, Responses
from megatron_dapo.config.actor_config import ActorConfig, OptimizerConfig
from megatron_dapo.config.run_config import ModelConfig
from tools.rank_pool import RankPlace

Dtype = Literal["float32", "bfloat16"]
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "base"


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Responses with their prompts: how many, and between how many tokens each."""

    responses: int
    shortest: int
    longest: int

    def mini_batch(self, config: ActorConfig, hidden_size: int, vocabulary: int) -> MiniBatch:
        """Random tokens; a quarter of each sequence is prompt. The same for every layout."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(self.shortest, self.longest + 1, self.responses).astype(np.int32)
        prompts = np.maximum(1, lengths // 4).astype(np.int32)
        responses = Responses(
            token_ids=rng.integers(0, vocabulary, lengths.sum()).astype(np.int32),
            sequence_lengths=lengths,
            prompt_lengths=prompts,
        )
        tokens = responses.num_response_tokens
        return MiniBatch(
            responses=responses,
            weights=np.full(tokens, 1 / tokens, dtype=np.float32),
            plan=plan_for_actor(lengths, config, hidden_size=hidden_size),
            advantages=np.repeat(rng.normal(size=len(lengths)), lengths - prompts).astype(np.float32),
            old_log_probs=rng.normal(-np.log(vocabulary), 0.1, tokens).astype(np.float32),
        )


def actor_config(**fields: Any) -> ActorConfig:
    """On the CPU; the rate is so low that the weights hardly move."""
    fields = {"optimizer": OptimizerConfig(lr=1e-9, warmup_rollout_steps=0)} | fields
    return ActorConfig(device="cpu", **fields)


def start(
    place: RankPlace, folder: Path, lengths: Lengths, config: ActorConfig, dtype: Dtype = "float32"
) -> tuple[MegatronActor, MiniBatch]:
    """The actor of one rank and its mini-batch."""
    actor = MegatronActor(
        config,
        ModelConfig(path=str(folder), context_length=lengths.longest, dtype=dtype),
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        steps_per_rollout=1,
        seed=0,
        timeout_s=600,
    )
    return actor, lengths.mini_batch(config, actor.hf.hidden_size, actor.hf.vocab_size)


def spread(values: list[float], digits: int = 2) -> str:
    """Median, and the quartiles of two or more."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    shown = [f"{value:.{digits}f}" for value in (median(values), low, high)]
    return "{} ({} to {})".format(*shown)
