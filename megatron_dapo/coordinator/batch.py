"""Admitted groups -> what the trainer gets: responses, advantages, old log-probs, per-token loss weights, packing.

Law 1 starts here: the weight of every token is computed once per mini-batch, from the whole mini-batch; everything
later sums.

The trainer computes old log-probs while the batch is still being filled: it would otherwise wait for the slowest
response. Kept groups are known in prompt order long before the batch is full, and the weights do not change meanwhile.
Every `CHUNKS`-th part of the batch is sent to the trainer as soon as it is kept. The chunks depend on the order of
prompts alone, never on time: a resumed run computes the same numbers, bit for bit.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from megatron_dapo.actor.packing import plan_for_actor
from megatron_dapo.actor.step_data import LogProbs, MiniBatch, Responses, UpdateMetrics
from megatron_dapo.algorithm.advantage import Estimator, standardized, step_advantages
from megatron_dapo.algorithm.aggregation import kl_scale, token_weights
from megatron_dapo.algorithm.entropy_control import controlled
from megatron_dapo.algorithm.importance import Correction, Mismatch, correction_weights, mismatch
from megatron_dapo.algorithm.losses import LOSSES
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.algorithm.token_loss import PolicyLoss
from megatron_dapo.config import ConfigError
from megatron_dapo.config.algorithm_config import ESTIMATORS, AdvantageConfig, AlgorithmConfig
from megatron_dapo.config.root import Config
from megatron_dapo.config.run_config import MonitorConfig
from megatron_dapo.experience.groups import Admission, ScoredGroup
from megatron_dapo.monitor.timeline import StepTimer
from reward.registry import load_named
from rollout.fleet.member import end_all

if TYPE_CHECKING:  # who only packs a batch needs no Ray
    from megatron_dapo.cluster.trainer import Trainer

TAKEN_NAMES = {"loss", "tokens", "log_prob", "entropy", "approx_kl_old", "kl"}
"""Statistics that a policy loss may not have: the update's own."""

CHUNKS = 8
"""A full batch's log-probs are computed in so many pieces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepArrays:
    """All responses of one rollout step, group after group. R responses, N response tokens."""

    responses: Responses
    rollout_log_probs: np.ndarray
    """float32 [N], as the engine gave them."""
    weight_versions: np.ndarray
    """int32 [N]: which weights wrote the token."""
    advantages: np.ndarray
    """float32 [R], of the shaped rewards: `algorithm.advantage.step_advantages`."""
    carries_loss: np.ndarray
    """bool [R]; False where overlong filtering masks a truncated response."""


def objective_of(algorithm: AlgorithmConfig) -> PolicyObjective:
    """What an optimizer step minimises.

    Raises:
        ConfigError: `policy_loss` names no class that can be called with `loss_options`, or that gives no PolicyLoss.
    """
    name, options = algorithm.policy_loss, dict(algorithm.loss_options)
    entry = LOSSES.get(name)
    for key in entry.reads if entry else ():
        section, _, field = key.partition(".")
        options[field] = getattr(getattr(algorithm, section), field)
    try:
        loss: object = load_named(entry.path if entry else name)(**options)
        if not isinstance(loss, PolicyLoss):
            raise TypeError("it gives no PolicyLoss, which has stat_names and __call__(log_probs, columns)")
        inspect.signature(loss).bind("log_probs", "columns")
        if taken := TAKEN_NAMES.intersection(loss.stat_names):
            raise ValueError(f"its statistic {min(taken)} has the name of one that every objective has")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"algorithm.policy_loss = {name}, made with loss_options {options}: {error}") from None
    kl = {f"kl_{key}": getattr(algorithm.kl, key) for key in ("coefficient", "estimator", "aggregation")}
    return PolicyObjective(loss=loss, **kl, entropy_coefficient=algorithm.entropy_coefficient)


def advantages_of(rewards: torch.Tensor, response_lengths: torch.Tensor, config: AdvantageConfig) -> torch.Tensor:
    """`algorithm.advantage.step_advantages`, or what the user's own function makes of shaped rewards [P, G].

    Raises:
        ConfigError: `estimator` names no function that gives a finite number a response.
    """
    if config.estimator in ESTIMATORS:
        known = cast(Estimator, config.estimator)
        return step_advantages(rewards, response_lengths, epsilon=config.epsilon, ddof=config.ddof, estimator=known)
    try:
        found = load_named(config.estimator)(rewards, response_lengths.reshape(rewards.shape))
    except Exception as error:  # a user's code may fail in any way
        raise ConfigError(f"algorithm.advantage.estimator = {config.estimator}: {error!r}") from error
    if not (isinstance(found, torch.Tensor) and found.shape == rewards.shape and found.isfinite().all()):
        wanted = f"must give finite numbers {[*rewards.shape]}, one a response; got {found!r:.200}"
        raise ConfigError(f"algorithm.advantage.estimator = {config.estimator}: {wanted}")
    return found.flatten()


def responses_of(groups: Sequence[ScoredGroup], config: Config) -> Responses:
    """Prompts and responses of the groups, flat, group after group; under `actor.routing_replay` with their routing."""
    everyone = [(group.prompt_ids, response.generation) for group in groups for response in group.responses]
    pairs = [(prompt, generation.token_ids) for prompt, generation in everyone]
    none = np.zeros((0, 0, 0), np.uint8)  # refused as too few rows
    routing = [none if generation.routing is None else generation.routing for _, generation in everyone]
    given = [generation.given for _, generation in everyone]
    return Responses.of(pairs, given, routing if config.actor.routing_replay else ())


def step_arrays(groups: Sequence[ScoredGroup], config: Config) -> StepArrays:
    """Flatten the groups and compute their advantages."""
    everyone = [response for group in groups for response in group.responses]
    rewards = torch.tensor([[one.reward_shaped for one in group.responses] for group in groups], dtype=torch.float64)
    truncated, responses = np.array([response.truncated for response in everyone]), responses_of(groups, config)
    lengths = torch.from_numpy(responses.response_lengths.astype(np.int64))
    return StepArrays(
        responses=responses,
        rollout_log_probs=np.concatenate([response.generation.log_probs for response in everyone]).astype(np.float32),
        weight_versions=np.concatenate([response.generation.weight_versions for response in everyone]),
        advantages=advantages_of(rewards, lengths, config.algorithm.advantage).numpy().astype(np.float32),
        carries_loss=~truncated if config.algorithm.overlong.filter else np.ones(len(everyone), bool),
    )


def step_correction(arrays: StepArrays, old: LogProbs, config: Config) -> Correction | None:
    """Weights against the gap between engine and trainer, float32 [N]; None where the config wants none."""
    importance, mode = config.algorithm.importance, config.algorithm.importance_mode
    if mode == "none":
        return None
    return correction_weights(
        torch.tensor(old.log_probs),
        torch.tensor(arrays.rollout_log_probs),
        **asdict(importance) | {"mode": mode},
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
    """The step's optimizer steps: groups in a seeded random order, `mini_batch_responses` at a time, no group split.

    `config`: as it holds in the step.
    """
    algorithm, lengths = config.algorithm, arrays.responses.response_lengths
    group_size = algorithm.group_size
    groups = len(arrays.advantages) // group_size
    order = np.random.Generator(np.random.PCG64([config.run.seed, rollout_step])).permutation(groups)
    members = order[:, None] * group_size + np.arange(group_size)
    corrections = None if correction is None else correction.weights.numpy()
    entry, kl = LOSSES.get(algorithm.policy_loss), algorithm.kl
    engine = arrays.rollout_log_probs if entry is None or entry.needs_rollout_log_probs else None

    def mini_batch(chosen: np.ndarray) -> MiniBatch:
        responses, tokens = arrays.responses.select(chosen), arrays.responses.response_token_indices(chosen)
        plan = plan_for_actor(responses.sequence_lengths, config.actor, hidden_size=hidden_size)
        response_lengths, mask = torch.from_numpy(lengths[chosen].astype(np.int64)), arrays.carries_loss[chosen]
        weights = token_weights(
            response_lengths,
            torch.from_numpy(np.repeat(np.arange(len(chosen) // group_size), group_size)),
            algorithm.aggregation,
            mask=torch.from_numpy(mask),
            constant_length=config.rollout.max_new_tokens,
            micro_batch_index=torch.from_numpy(plan.micro_batch_index()),
        )
        scale = None
        if reference is not None and (kl.aggregation == "response_mean" or kl.aggregation == "response_sum"):
            scale = kl_scale(weights, response_lengths, kl.aggregation, mask=torch.from_numpy(mask)).numpy()
        advantages = arrays.advantages[chosen]
        if algorithm.advantage.estimator == "mini_batch_std":
            epsilon, ddof = algorithm.advantage.epsilon, algorithm.advantage.ddof
            deviations = torch.from_numpy(advantages).double()
            advantages = standardized(deviations, epsilon=epsilon, ddof=ddof).numpy().astype(np.float32)
        return MiniBatch(
            responses=responses,
            weights=weights.numpy().astype(np.float32),
            advantages=np.repeat(advantages, lengths[chosen]),
            old_log_probs=old.log_probs[tokens],
            reference_log_probs=None if reference is None else reference.log_probs[tokens],
            correction=None if corrections is None else corrections[tokens],
            rollout_log_probs=None if engine is None else engine[tokens],
            kl_scale=scale,
            plan=plan,
        )

    per_batch = algorithm.mini_batch_responses // group_size
    # In equal parts: of 33 groups, with room for 32, no mini-batch is left with one.
    return [mini_batch(part.reshape(-1)) for part in np.array_split(members, -(-groups // per_batch))]


class LogProbStream(AbstractAsyncContextManager["LogProbStream"]):
    """Log-probs of the groups given to `add`, in that order. Use as a context: what is under way ends with it."""

    def __init__(self, trainer: "Trainer", config: Config, lose: Callable[[Exception], None]) -> None:
        """`config`: as it holds in the step. `lose`: told of a failure at once, not when the batch is full."""
        self._trainer, self._config, self._lose = trainer, config, lose
        self._chunk_size = -(-config.algorithm.prompts_per_step // CHUNKS)
        self._wait = config.run.mode == "colocated"
        """Nothing is sent before `finish`, while the servers have the memory; the chunks are the same."""
        self._waiting: list[ScoredGroup] = []
        self._chunks: list[asyncio.Task[LogProbs]] = []

    async def __aexit__(self, *_: object) -> None:
        await end_all(self._chunks)

    def add(self, group: ScoredGroup) -> None:
        """The next kept group."""
        self._waiting.append(group)
        if len(self._waiting) == self._chunk_size and not self._wait:
            self._send()

    async def finish(self) -> LogProbs:
        """Of all groups, [N] in the order of `add`.

        Raises:
            TrainerError: a rank failed, now or while the batch was filled.
        """
        while self._waiting:
            self._send()
        chunks = await asyncio.gather(*self._chunks)
        counts = [chunk.expert_counts for chunk in chunks if chunk.expert_counts is not None]
        return LogProbs(
            log_probs=np.concatenate([chunk.log_probs for chunk in chunks]),
            entropy=np.concatenate([chunk.entropy for chunk in chunks]),
            expert_counts=np.sum(counts, axis=0) if counts else None,
        )

    def _send(self) -> None:
        responses = responses_of(self._waiting[: self._chunk_size], self._config)
        del self._waiting[: self._chunk_size]
        self._chunks.append(asyncio.create_task(self._scored(responses)))

    async def _scored(self, responses: Responses) -> LogProbs:
        try:
            return await self._trainer.log_probs(responses, self._config.rollout.temperature)
        except Exception as error:
            self._lose(error)
            raise


class MismatchStop(RuntimeError):
    """Engine and trainer disagree so much that they cannot hold the same model."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Engine against trainer on the same tokens."""

    current: Mismatch
    """Tokens written by the weights that the trainer holds: only kernels differ."""
    stale: Mismatch
    """Tokens written by older weights."""
    stale_share: float
    """Share of the tokens that are stale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilledBatch:
    """N groups, and the trainer's log-probs of their tokens before any update."""

    admission: Admission
    arrays: StepArrays
    old: LogProbs
    gap: Gap


def filled_batch(admission: Admission, old: LogProbs, config: Config, weight_version: int) -> FilledBatch:
    """`old`: of the kept groups, in order; `weight_version`: the trainer's. Raises as `check_mismatch`."""
    arrays = step_arrays(admission.kept, config)
    gap = check_mismatch(old, arrays, weight_version, config.monitor)
    return FilledBatch(admission=admission, arrays=arrays, old=old, gap=gap)


def check_mismatch(old: LogProbs, arrays: StepArrays, weight_version: int, limits: MonitorConfig) -> Gap:
    """The gap between engine and trainer, apart for tokens of the current weights and of older ones.

    Where all tokens are older (of servers faster than the trainer), their gap is judged by the upper limit: it has the
    update in it, which is far below that.

    Raises:
        MismatchStop: it is above `monitor.mismatch_stop` on tokens of the current weights, or of older ones if there
            are no others.
    """
    trainer, engine = torch.tensor(old.log_probs), torch.tensor(arrays.rollout_log_probs)
    current = torch.from_numpy(arrays.weight_versions == weight_version)
    of_current, of_older = (mismatch(trainer[which], engine[which]) for which in (current, ~current))
    gap = Gap(current=of_current, stale=of_older, stale_share=float((~current).double().mean()))
    judged, of = (gap.current, "") if gap.stale_share < 1 else (gap.stale, " of tokens that older weights wrote")
    mean_abs = judged.mean_abs
    if not mean_abs <= limits.mismatch_stop:  # also when it is not a number
        told = f"mean |engine - trainer| log-prob{of} is {mean_abs:.3g}, above monitor.mismatch_stop"
        raise MismatchStop(f"{told} = {limits.mismatch_stop:g}: the servers do not hold the trainer's model")
    return gap


def entropy_weight(algorithm: AlgorithmConfig, last: float | None, batch: FilledBatch) -> tuple[float, float | None]:
    """Of this step's entropy bonus, and what `algorithm.entropy_control` makes of `last`, the step's coefficient, for
    the next; None: it is off."""
    control = algorithm.entropy_control
    if control.target is None:
        return algorithm.entropy_coefficient, None
    coefficient = algorithm.entropy_coefficient if last is None else min(last, control.maximum)
    entropy = float(batch.old.entropy.mean())
    return controlled(coefficient, entropy, target=control.target, change=control.change, maximum=control.maximum)


async def update_actor(
    trainer: "Trainer", config: Config, batch: FilledBatch, step: int, timer: StepTimer, hidden_size: int
) -> tuple[list[UpdateMetrics], Correction | None]:
    """One optimizer step a mini-batch; the correction for the gap to the engine that its loss was weighted with.

    `config`: as it holds in rollout step `step`, the weight of the entropy bonus too.
    """
    reference, temperature = None, config.rollout.temperature
    if config.algorithm.kl.coefficient > 0:
        with timer.measure("logprob"):
            reference = await trainer.log_probs(batch.arrays.responses, temperature, reference=True)
    correction = step_correction(batch.arrays, batch.old, config)
    with timer.measure("update"):
        batches = mini_batches(batch.arrays, batch.old, reference, correction, config, step, hidden_size=hidden_size)
        return await trainer.update(batches, objective_of(config.algorithm), temperature), correction
