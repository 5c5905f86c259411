"""Law 1 from rewards to gradients: every advantage estimator and every aggregation, through the coordinator's batch and
real Megatron-Core over gloo, against the papers' formulas on transformers' forward in float64."""

from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.step_data import LogProbs, MiniBatch
from megatron_dapo.algorithm.losses.clipped import Clipped
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config import Config, load_config
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.config.algorithm_config import ESTIMATORS
from megatron_dapo.coordinator.batch import StepArrays, mini_batches, step_arrays
from megatron_dapo.experience.groups import ScoredGroup, ScoredResponse
from reward.verdict import Verdict
from rollout.generation import FinishReason, Generation
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, actor_config, reference_log_probs, relative_error, start_actor
from tests.actor.tiny import load_reference, save_tiny
from tools.actor_job import loss_and_gradients
from tools.certificate import AGGREGATIONS, choose_layouts, fitting_layouts

GROUP, GROUPS, LONGEST, EPSILON = 3, 4, 24, 1e-6
REWARDS = np.array([[1, -1, -1], [1, 1, -1.5], [-1, 1, -1.75], [1, -1, -2]])
LENGTHS = np.array([[9, 24, 1], [17, 4, 21], [13, 2, 11], [6, 8, 15]])
CUT = (0, 1)
"""This response was truncated: its reward counts, its tokens carry no loss."""
OBJECTIVE = PolicyObjective(loss=Clipped(low=0.2, high=0.28))
RELATIVE = 2e-5
"""Balanced advantages cancel, so rounding is a larger share than in `test_step`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=False)


@pytest.fixture(scope="module")
def groups() -> list[ScoredGroup]:
    """The first token of a prompt is its group's number."""
    rng = np.random.default_rng(5)

    def response(group: int, sample: int) -> ScoredResponse:
        length, right = int(LENGTHS[group, sample]), bool(REWARDS[group, sample] > 0)
        return ScoredResponse(
            generation=Generation(
                request_id="r",
                token_ids=rng.integers(0, 101, length).astype(np.int32),
                log_probs=np.zeros(length, np.float32),
                weight_versions=np.zeros(length, np.int32),
                finish_reason=FinishReason.LENGTH if (group, sample) == CUT else FinishReason.STOP,
            ),
            text="",
            verdict=Verdict(accuracy=right, extracted=None, rule="t", seconds=0.0),
            accuracy=right,
            reward_raw=1.0 if right else -1.0,
            reward_shaped=float(REWARDS[group, sample]),
        )

    return [
        ScoredGroup(
            position=number,
            prompt_index=number,
            prompt_ids=np.array([number, *rng.integers(0, 101, 2 + number)], np.int32),
            weight_version=0,
            responses=tuple(response(number, sample) for sample in range(GROUP)),
        )
        for number in range(GROUPS)
    ]


@pytest.fixture(scope="module")
def old(groups, model) -> LogProbs:
    """Near the model's own, so that both clips cut tokens."""
    file = model / "config.yaml"
    with torch.no_grad():
        log_probs, _ = reference_log_probs(load_reference(model), step_arrays(groups, config_of(file)).responses)
    noise = np.random.default_rng(6).normal(0, 0.25, len(log_probs))
    return LogProbs(log_probs=(log_probs.numpy() + noise).astype(np.float32), entropy=np.zeros(len(noise), np.float32))


def config_of(file: Path, *overrides: str) -> Config:
    file.write_text(
        "run: {dir: x, rollout_steps: 1}\nmodel: {path: m, context_length: 200}\n"
        "data: {path: p, max_prompt_tokens: 50}\n"
        f"evaluation: {{path: e}}\nrollout: {{max_new_tokens: {LONGEST}}}\n"
        f"algorithm: {{group_size: {GROUP}, prompts_per_step: {GROUPS}, mini_batch_responses: {2 * GROUP},"
        f" overlong: {{buffer: 4, filter: true}}, advantage: {{epsilon: {EPSILON}}}}}\n"
    )
    return load_config(file, list(overrides))


def gradients_of(
    place: RankPlace,
    folder: Path,
    layout: dict[str, Any],
    budget: int,
    arrays: StepArrays,
    old: LogProbs,
    chosen: Config,
) -> list[tuple[MiniBatch, dict[str, torch.Tensor]]] | None:
    """Rank 0: each optimizer step's mini-batch and gradient."""
    config = actor_config(layout, micro_batch_tokens=budget)
    actor = start_actor(place, folder, config)
    batches = mini_batches(arrays, old, None, None, replace(chosen, actor=config), 1, hidden_size=64)
    found = [loss_and_gradients(actor, batch, OBJECTIVE, TEMPERATURE) for batch in batches]
    return None if found[0] is None else [(batch, result[1]) for batch, result in zip(batches, found, strict=True)]


def papers_advantages(estimator: str, members: list[int]) -> np.ndarray:
    """[GROUPS, GROUP], float64, as the papers write them; `members`: the groups of the mini-batch."""
    centred = REWARDS - REWARDS.mean(1, keepdims=True)
    if estimator == "no_std":
        return centred
    if estimator == "group_std":
        return centred / (REWARDS.std(1, ddof=1, keepdims=True) + EPSILON)
    if estimator == "rloo":
        return REWARDS - (REWARDS.sum(1, keepdims=True) - REWARDS) / (GROUP - 1)
    if estimator == "batch_std":
        return centred / (centred.std(ddof=1) + EPSILON)
    counted = centred[members].ravel() if estimator == "mini_batch_std" else np.repeat(centred.ravel(), LENGTHS.ravel())
    return (centred - counted.mean()) / (counted.std(ddof=1) + EPSILON)


def papers_weights(aggregation: str, members: list[int], micro_batch: np.ndarray) -> np.ndarray:
    """[groups of the mini-batch, GROUP]: what a token of each response weighs; 0 for the truncated one."""
    kept = np.array([[(group, sample) != CUT for sample in range(GROUP)] for group in members])
    lengths = np.where(kept, LENGTHS[members], 0)
    responses, tokens = kept.sum(), lengths.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        if aggregation == "token_mean":
            weights = np.full(lengths.shape, 1 / tokens)
        elif aggregation == "prompt_token_mean":
            weights = np.broadcast_to(1 / len(members) / lengths.sum(1, keepdims=True), lengths.shape)
        elif aggregation == "sequence_mean":
            weights = 1 / responses / lengths
        elif aggregation == "sequence_sum_constant":
            weights = np.full(lengths.shape, 1 / responses / LONGEST)
        else:
            same = (micro_batch[:, None] == micro_batch).astype(float)
            weights = (same @ kept.ravel() / responses / (same @ lengths.ravel())).reshape(lengths.shape)
    return np.where(kept, weights, 0)


def papers_gradient(folder: Path, batch: MiniBatch, old: LogProbs, estimator: str, aggregation: str):
    """Of eq. 8's clipped objective, response by response in float64."""
    starts = np.cumsum([0, *batch.responses.sequence_lengths[:-1]])
    members = batch.responses.token_ids[starts][::GROUP].tolist()
    advantages = papers_advantages(estimator, members)[members].ravel()
    weights = papers_weights(aggregation, members, batch.plan.micro_batch_index()).ravel()
    model = load_reference(folder).double()
    new = reference_log_probs(model, batch.responses)[0].split(LENGTHS[members].ravel().tolist())
    # The step's tokens lie group after group.
    ends = np.cumsum([0, *LENGTHS.ravel()])
    of_step = [torch.from_numpy(old.log_probs[a:b]).double() for a, b in pairwise(ends)]
    before = [of_step[group * GROUP + sample] for group in members for sample in range(GROUP)]
    loss = torch.zeros((), dtype=torch.float64)
    for now, then, advantage, weight in zip(new, before, advantages, weights, strict=True):
        ratio = torch.exp(now - then)
        loss = loss - weight * torch.min(ratio * advantage, ratio.clip(0.8, 1.28) * advantage).sum()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def certify(gloo, model, groups, old, estimator, aggregation, layout: LayoutConfig, budget: int) -> None:
    keys = f"algorithm.advantage.estimator={estimator}", f"algorithm.aggregation={aggregation}"
    chosen = config_of(model / "config.yaml", *keys)
    arrays = step_arrays(groups, chosen)
    ranks = gloo(layout.world_size, gradients_of, model, asdict(layout), budget, arrays, old, chosen)
    assert len(ranks[0]) == 2
    for batch, got in ranks[0]:
        errors = relative_error(got, papers_gradient(model, batch, old, estimator, aggregation))
        assert max(errors.values()) < RELATIVE, (layout, budget, errors)


PAIRS = [(estimator, AGGREGATIONS[at % len(AGGREGATIONS)]) for at, estimator in enumerate(sorted(ESTIMATORS))]
"""Each estimator and each aggregation at least once."""


@pytest.mark.parametrize(("estimator", "aggregation"), PAIRS)
def test_every_estimator_and_aggregation_is_its_papers(gloo, model, groups, old, estimator, aggregation):
    certify(gloo, model, groups, old, estimator, aggregation, LayoutConfig(context=2), 60)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_estimator_with_every_aggregation_on_random_layouts(gloo, model, groups, old, estimator, aggregation):
    """Layouts and packings as `certify` draws them."""
    seed = [sorted(ESTIMATORS).index(estimator), AGGREGATIONS.index(aggregation)]
    rng, fitting = np.random.default_rng(seed), fitting_layouts(HFModelConfig.load(model), 4)
    for layout in choose_layouts(fitting, 3, seed=int(rng.integers(1000)), always=LayoutConfig()):
        certify(gloo, model, groups, old, estimator, aggregation, layout, int(rng.integers(1, 200)))
