"""The mini-batch of a certificate: ragged lengths, and numbers that put tokens on both sides of every clip."""

from typing import get_args

import numpy as np
import torch

from megatron_dapo.actor.packing import MicroBatchPlan
from megatron_dapo.actor.step_data import LogProbs, MiniBatch, Responses
from megatron_dapo.algorithm.aggregation import Aggregation, kl_scale, token_weights
from megatron_dapo.config import Config

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)

GROUP = 4
"""Responses a prompt."""

RATIO_SPREAD = 0.3
"""Standard deviation of log(pi / pi_old): about a third of the tokens lie outside 0.8 .. 1.28."""

KINK_DISTANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""No log-ratio is nearer to a clip bound's: there rounding, that of the type of the layouts, decides which side a token
is on, and its gradient jumps."""


def random_responses(*, count: int, longest: int, vocabulary: int, seed: int) -> Responses:
    """Lognormal lengths; the last response fills `longest` tokens (prompt included), the first has a single token."""
    rng = np.random.default_rng([seed, 0])
    prompts = rng.integers(1, max(2, longest // 4), count)
    room = longest - prompts
    lengths = np.clip(rng.lognormal(np.log(longest / 4), 0.8, count).astype(np.int64), 1, room)
    lengths[0], lengths[-1] = 1, room[-1]
    return Responses(
        token_ids=rng.integers(0, vocabulary, int((prompts + lengths).sum())).astype(np.int32),
        sequence_lengths=(prompts + lengths).astype(np.int32),
        prompt_lengths=prompts.astype(np.int32),
    )


def random_mini_batches(
    config: Config, responses: Responses, current: LogProbs, plan: MicroBatchPlan, weights_plan: MicroBatchPlan
) -> dict[Aggregation, MiniBatch]:
    """The responses under each aggregation, packed by `plan`: random advantages, and old log-probs near `current`, the
    model's own, so that the clip acts on some tokens. One response is masked, as overlong filtering does.

    Args:
        weights_plan: packing that `verl_legacy` takes its weights from: they are part of the mini-batch, so one for all
            layouts.
    """
    rng = np.random.default_rng([config.run.seed, 1])
    tokens, lengths = responses.num_response_tokens, responses.response_lengths
    columns = {
        "advantages": np.repeat(_advantages(rng, len(lengths)), lengths),
        "old_log_probs": current.log_probs - _log_ratios(rng, tokens, config),
    }
    if config.algorithm.kl.coefficient > 0:
        columns["reference_log_probs"] = current.log_probs - rng.normal(0, RATIO_SPREAD, tokens)
    if config.algorithm.importance_mode != "none":
        columns["correction"] = rng.uniform(0.5, 2.0, tokens)
    columns["rollout_log_probs"] = current.log_probs - rng.normal(0, RATIO_SPREAD, tokens)
    columns = {name: column.astype(np.float32) for name, column in columns.items()}
    response_lengths, mask = torch.from_numpy(lengths.astype(np.int64)), torch.arange(len(lengths)) != len(lengths) // 2

    def mini_batch(aggregation: Aggregation) -> MiniBatch:
        weights = token_weights(
            response_lengths,
            torch.arange(len(lengths)) // GROUP,
            aggregation,
            mask=mask,
            constant_length=config.rollout.max_new_tokens,
            micro_batch_index=torch.from_numpy(weights_plan.micro_batch_index()),
        )
        kl, scale = config.algorithm.kl, None
        if kl.coefficient > 0 and (kl.aggregation == "response_mean" or kl.aggregation == "response_sum"):
            scale = kl_scale(weights, response_lengths, kl.aggregation, mask=mask).numpy()
        return MiniBatch(responses=responses, plan=plan, weights=weights.numpy(), kl_scale=scale, **columns)

    return {aggregation: mini_batch(aggregation) for aggregation in AGGREGATIONS}


def _advantages(rng: np.random.Generator, responses: int) -> np.ndarray:
    """float64 [R]: of each prompt's responses one has a negative advantage, which is smaller.

    Were they balanced, as eq. 9 makes them, the loss would be a small difference of large terms, and a rounding of
    1e-7 of the terms could be any share of the loss.
    """
    size = rng.uniform(0.5, 2.0, responses)
    return np.where(np.arange(responses) % GROUP == 1, -size / 4, size)


def _log_ratios(rng: np.random.Generator, tokens: int, config: Config) -> np.ndarray:
    """float64 [tokens]: log(pi / pi_old), kept away from the clip bounds of the config, whatever the objective."""
    clip, distance = config.algorithm.clip, KINK_DISTANCE[config.model.dtype]
    drawn = rng.normal(0, RATIO_SPREAD, tokens)
    for bound in (1 - clip.low, 1 + clip.high, clip.dual):
        if bound:
            near = np.abs(drawn - np.log(bound)) < distance
            drawn[near] = np.log(bound) + np.copysign(distance, drawn[near] - np.log(bound))
    return drawn
