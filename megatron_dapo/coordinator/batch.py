"""Admitted groups -> the arrays that the trainer gets: responses, advantages, per-token loss weights, packing. Pure.

Law 1 starts here: the weight of every token is computed once per mini-batch, from the whole mini-batch; everything
later sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.step_data import LogProbs, MiniBatch, Responses
from megatron_dapo.algorithm.advantage import group_advantages
from megatron_dapo.algorithm.aggregation import token_weights
from megatron_dapo.algorithm.importance import Correction, correction_weights
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.algorithm_config import AlgorithmConfig
from megatron_dapo.config.root import Config
from megatron_dapo.experience.groups import ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StepArrays:
    """All responses of one rollout step, group after group. R responses, N response tokens."""

    responses: Responses
    rollout_log_probs: np.ndarray
    """float32 [N], as the engine gave them."""
    weight_versions: np.ndarray
    """int32 [N]: which weights wrote the token."""
    advantages: np.ndarray
    """float32 [R], eq. 9 of the shaped rewards."""
    carries_loss: np.ndarray
    """bool [R]; False where overlong filtering masks a truncated response."""


def objective_of(algorithm: AlgorithmConfig) -> PolicyObjective:
    """What an optimizer step minimises."""
    return PolicyObjective(
        clip_low=algorithm.clip.low,
        clip_high=algorithm.clip.high,
        clip_dual=algorithm.clip.dual,
        kl_coefficient=algorithm.kl.coefficient,
        kl_estimator=algorithm.kl.estimator,
        kl_aggregation=algorithm.kl.aggregation,
        entropy_coefficient=algorithm.entropy_coefficient,
    )


def responses_of(groups: Sequence[ScoredGroup]) -> Responses:
    """Prompts and responses of the groups, flat, group after group."""
    everyone = [(group.prompt_ids, response.generation.token_ids) for group in groups for response in group.responses]
    return Responses(
        token_ids=np.concatenate([ids for pair in everyone for ids in pair]).astype(np.int32),
        sequence_lengths=np.array([len(prompt) + len(response) for prompt, response in everyone], np.int32),
        prompt_lengths=np.array([len(prompt) for prompt, _ in everyone], np.int32),
    )


def step_arrays(groups: Sequence[ScoredGroup], config: Config) -> StepArrays:
    """Flatten the groups and compute their advantages."""
    everyone = [response for group in groups for response in group.responses]
    advantage = config.algorithm.advantage
    rewards = torch.tensor(
        [[response.reward_shaped for response in group.responses] for group in groups], dtype=torch.float64
    )
    truncated = np.array([response.truncated for response in everyone])
    return StepArrays(
        responses=responses_of(groups),
        rollout_log_probs=np.concatenate([response.generation.log_probs for response in everyone]).astype(np.float32),
        weight_versions=np.concatenate([response.generation.weight_versions for response in everyone]),
        advantages=group_advantages(rewards, epsilon=advantage.epsilon, ddof=advantage.ddof)
        .flatten()
        .numpy()
        .astype(np.float32),
        carries_loss=~truncated if config.algorithm.overlong.filter else np.ones(len(everyone), bool),
    )


def step_correction(arrays: StepArrays, old: LogProbs, config: Config) -> Correction | None:
    """Weights against the gap between engine and trainer, float32 [N]; None where the config wants none."""
    importance = config.algorithm.importance
    if importance.mode == "none":
        return None
    return correction_weights(
        torch.tensor(old.log_probs),
        torch.tensor(arrays.rollout_log_probs),
        mode=importance.mode,
        level=importance.level,
        upper=importance.upper,
        lower=importance.lower,
        response_lengths=torch.from_numpy(arrays.responses.response_lengths.astype(np.int64)),
    )


def mini_batches(
    arrays: StepArrays,
    old: LogProbs,
    reference: LogProbs | None,
    correction: Correction | None,
    config: Config,
    rollout_step: int,
    *,
    hidden_size: int,
) -> list[MiniBatch]:
    """The step's optimizer steps: groups in a seeded random order, `mini_batch_responses` at a time, no group split."""
    algorithm, lengths = config.algorithm, arrays.responses.response_lengths
    group_size = algorithm.group_size
    groups = len(arrays.advantages) // group_size
    order = np.random.Generator(np.random.PCG64([config.run.seed, rollout_step])).permutation(groups)
    members = order[:, None] * group_size + np.arange(group_size)
    corrections = None if correction is None else correction.weights.numpy()

    def mini_batch(chosen: np.ndarray) -> MiniBatch:
        responses, tokens = arrays.responses.select(chosen), arrays.responses.response_token_indices(chosen)
        plan = plan_for_actor(responses.sequence_lengths, config.actor, hidden_size=hidden_size)
        weights = token_weights(
            torch.from_numpy(lengths[chosen].astype(np.int64)),
            torch.from_numpy(np.repeat(np.arange(len(chosen) // group_size), group_size)),
            algorithm.aggregation,
            mask=torch.from_numpy(arrays.carries_loss[chosen]),
            constant_length=config.rollout.max_new_tokens,
            micro_batch_index=torch.from_numpy(plan.micro_batch_index()),
        )
        return MiniBatch(
            responses=responses,
            weights=weights.numpy().astype(np.float32),
            advantages=np.repeat(arrays.advantages[chosen], lengths[chosen]),
            old_log_probs=old.log_probs[tokens],
            reference_log_probs=None if reference is None else reference.log_probs[tokens],
            correction=None if corrections is None else corrections[tokens],
            plan=plan,
        )

    per_batch = algorithm.mini_batch_responses // group_size
    return [mini_batch(members[at : at + per_batch].reshape(-1)) for at in range(0, groups, per_batch)]
