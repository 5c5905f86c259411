"""The actor's calls against transformers, torch's AdamW, and sums written out in numpy."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.quickstart.supervised import SupervisedObjective
from megatron_dapo.actor.step_data import LearningRate, LogProbs, UpdateMetrics
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import OptimizerConfig
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import (
    CLIP_HIGH,
    CLIP_LOW,
    TEMPERATURE,
    Columns,
    actor_config,
    columns,
    eq8_loss,
    mini_batch,
    reference_gradient,
    reference_log_probs,
    start_actor,
)
from tests.actor.tiny import load_reference, save_tiny

NONE_OF = ("reference_log_probs", "correction")
# A large epsilon makes Adam's first steps a smooth function of the gradient, not its sign.
OPTIMIZER = {"lr": 2e-2, "eps": 1e-2, "clip_norm": 0.5, "weight_decay": 0.3, "betas": (0.8, 0.9)}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=False)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


def log_probs_of(place: RankPlace, folder: Path, layout: dict[str, Any], data: Columns, dtype: str = "float32"):
    config = actor_config(layout)
    actor = start_actor(place, folder, config, dtype=dtype)
    return actor.log_probs(data.responses, mini_batch(data, config).plan, TEMPERATURE)


LAYOUTS = [{}, {"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"data": 2}, {"context": 2}]


def size(layout: dict[str, Any]) -> int:
    return int(np.prod([layout.get(name, 1) for name in ("tensor", "pipeline", "context", "data")]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_log_probs_come_back_in_the_order_of_the_responses(gloo, layout, model, data):
    results = gloo(size(layout), log_probs_of, model, layout, data)
    assert isinstance(results[0], LogProbs)
    assert results[1:] == [None] * (size(layout) - 1)
    with torch.no_grad():
        log_probs, entropy = reference_log_probs(load_reference(model), data.responses)
    np.testing.assert_allclose(results[0].log_probs, log_probs.numpy(), atol=2e-5)
    np.testing.assert_allclose(results[0].entropy, entropy.numpy(), atol=2e-5)


def test_log_probs_in_bfloat16_are_near(gloo, model, data):
    """8 bits of mantissa through four layers: about 0.1 nat on logits that spread over +-20."""
    got = gloo(1, log_probs_of, model, {}, data, "bfloat16")[0]
    with torch.no_grad():
        log_probs, _ = reference_log_probs(load_reference(model), data.responses)
    difference = np.abs(got.log_probs - log_probs.numpy())
    assert 1e-4 < difference.mean() < 0.2


def steps_of(
    place: RankPlace,
    folder: Path,
    layout: dict[str, Any],
    data: Columns,
    target: Path,
    optimizer: dict[str, Any],
    dtype: str = "float32",
) -> list[UpdateMetrics]:
    """Three optimizer steps in two calls, then the weights in `target`."""
    config = actor_config(layout, optimizer=optimizer)
    actor = start_actor(place, folder, config, dtype=dtype)
    batch = mini_batch(data, config, without=NONE_OF)
    reports = actor.update([batch, batch], PolicyObjective(), TEMPERATURE)
    reports += actor.update([batch], PolicyObjective(), TEMPERATURE)
    actor.export_hf(target)
    return reports


def reference_steps(
    folder: Path, data: Columns, steps: int
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """torch's AdamW and clipping on transformers' model in float64: weights, losses, gradient norms."""
    model = load_reference(folder).double()
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=2e-2,
        eps=1e-2,
        betas=(0.8, 0.9),
    )
    losses, norms = [], []
    for _ in range(steps):
        adamw.zero_grad()
        loss = eq8_loss(reference_log_probs(model, data.responses)[0], data)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        adamw.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses, norms


@pytest.mark.parametrize(
    ("layout", "distributed"),
    [
        ({}, True),
        ({}, False),
        ({"data": 2}, True),
        ({"data": 2}, False),
        ({"tensor": 2}, True),
        ({"pipeline": 2}, False),
    ],
    ids=str,
)
def test_three_steps_are_those_of_adamw(gloo, layout, distributed, model, data, tmp_path):
    optimizer = OPTIMIZER | {"distributed": distributed}
    reports = gloo(size(layout), steps_of, model, layout, data, tmp_path / "out", optimizer)
    weights, losses, norms = reference_steps(model, data, 3)
    np.testing.assert_allclose([report.loss for report in reports[0]], losses, rtol=1e-4)
    np.testing.assert_allclose([report.grad_norm for report in reports[0]], norms, rtol=1e-4)
    got = load_file(tmp_path / "out" / "model.safetensors")
    start = load_reference(model).state_dict()
    for name, wanted in weights.items():
        moved = float((wanted - start[name]).norm())
        assert float((got[name].double() - wanted).norm()) < 1e-3 * moved, name


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "sequence_parallel": True},
        {"pipeline": 2, "virtual_pipeline": 2},
        {"data": 2},
        {"context": 2},
    ],
    ids=str,
)
def test_every_rank_reports_the_same_and_it_adds_up(gloo, layout, model, data, tmp_path):
    reports = gloo(2, steps_of, model, layout, data, tmp_path / "out", OPTIMIZER)
    assert reports[0] == reports[1]
    first = reports[0][0]
    with torch.no_grad():
        log_probs, entropy = reference_log_probs(load_reference(model), data.responses)
    kept = data.columns["weights"] > 0
    log_probs, entropy = log_probs.numpy()[kept], entropy.numpy()[kept]
    old, advantages = data.columns["old_log_probs"][kept].astype(float), data.columns["advantages"][kept]
    ratio = np.exp(log_probs - old)
    high = (ratio > 1 + CLIP_HIGH) & (advantages > 0)
    wanted = {
        "log_prob": log_probs.sum(),
        "entropy": entropy.sum(),
        "approx_kl_old": (ratio - 1 - np.log(ratio)).sum(),
        "clipped_low": ((ratio < 1 - CLIP_LOW) & (advantages < 0)).sum(),
        "clipped_high": high.sum(),
        "clipped_high_prob": np.exp(log_probs)[high].sum(),
    }
    assert first.tokens == kept.sum()
    assert first.sums.keys() == wanted.keys()
    assert wanted["clipped_low"] > 0
    assert wanted["clipped_high"] > 0
    for name, value in wanted.items():
        assert first.sums[name] == pytest.approx(value, rel=1e-4), name
    assert first.sums["entropy"] / first.tokens == pytest.approx(entropy.mean(), rel=1e-4)
    gradient = reference_gradient(model, data).values()
    assert first.grad_norm == pytest.approx(float(torch.cat([g.flatten() for g in gradient]).norm()), rel=1e-5)
    assert [report.optimizer_step for report in reports[0]] == [1, 2, 3]


def small_steps_in_bfloat16(place: RankPlace, folder: Path, data: Columns, distributed: bool) -> list[float]:
    """How far the weights stand from where they started after 5 and after 10 steps, on average, in float32."""
    optimizer = {"lr": 2e-6, "weight_decay": 0.0, "distributed": distributed}
    config = actor_config(optimizer=optimizer, micro_batch_tokens=1000)
    actor = start_actor(place, folder, config, dtype="bfloat16")
    batch = mini_batch(data, config, without=("advantages", "old_log_probs", *NONE_OF))

    def master() -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in actor.optimizer.megatron.get_parameters()])

    start, distances = master().clone(), []
    for _ in range(2):
        actor.update([batch] * 5, SupervisedObjective(), TEMPERATURE)
        distances.append(float((master() - start).abs().mean()))
    return distances


@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_keeps_float32_master_weights(gloo, distributed, model, data):
    """Steps of 2e-6 are far below bfloat16's resolution of weights near 0.1, 5e-4: rounded each time, nothing moves."""
    first, second = gloo(1, small_steps_in_bfloat16, model, data, distributed)[0]
    assert 2.5 * 2e-6 < first <= 5.1 * 2e-6
    assert 5 * 2e-6 < second <= 10.1 * 2e-6


def rates_of(place: RankPlace, folder: Path, data: Columns, learning_rate: LearningRate | None) -> list[float]:
    config = actor_config(optimizer={"lr": 1e-3, "warmup_rollout_steps": 1.5})
    actor = start_actor(place, folder, config, learning_rate=learning_rate)
    batch = mini_batch(data, config, without=NONE_OF)
    return [report.lr for report in actor.update([batch] * 6, PolicyObjective(), TEMPERATURE)]


def test_warm_up_counts_rollout_steps(gloo, model, data):
    """1.5 rollout steps of 2 optimizer steps: 3 steps of warm-up."""
    assert gloo(1, rates_of, model, data, None)[0] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 1e-3, 1e-3])


def test_cosine_for_a_supervised_start(gloo, model, data):
    rate = LearningRate(peak=1.0e-4, warmup_steps=2, decay_steps=6)
    cosine = [1e-5 + 9e-5 * (1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 2, 3, 4)]
    assert gloo(1, rates_of, model, data, rate)[0] == pytest.approx([0.5e-4, 1e-4, *cosine])


def test_learning_rate_of_the_paper():
    rate = LearningRate.of(OptimizerConfig(), steps_per_rollout=16)
    assert rate == LearningRate(peak=1e-6, warmup_steps=320)


def poisoned_update(place: RankPlace, folder: Path, layout: dict[str, Any], data: Columns, target: Path, what: str):
    """An update that must fail after one that must not; the weights afterwards, and the error's text."""
    from megatron_dapo.actor.step_data import NonFiniteUpdateError

    config = actor_config(layout)
    actor = start_actor(place, folder, config)
    batch = mini_batch(data, config, without=NONE_OF)
    if what == "weight":
        # One number of one weight of the last stage's last layer.
        for name, parameter in actor.optimizer.chunks[-1].module.named_parameters():
            if name == "decoder.final_layernorm.weight":
                parameter.data[3] = float("nan")
        with pytest.raises(NonFiniteUpdateError) as caught:
            actor.update([batch], PolicyObjective(), TEMPERATURE)
        return str(caught.value)
    # A hook that spoils the gradient of one weight on rank 0 alone.
    if place.rank == 0:
        parameter = dict(actor.optimizer.chunks[0].module.named_parameters())["decoder.layers.0.mlp.linear_fc2.weight"]
        parameter.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NonFiniteUpdateError) as caught:
        actor.update([batch], PolicyObjective(), TEMPERATURE)
    actor.export_hf(target)
    return str(caught.value)


@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"data": 2}, {"tensor": 2}], ids=str)
def test_a_non_finite_gradient_stops_all_ranks_and_names_it(gloo, layout, model, data, tmp_path):
    messages = gloo(2, poisoned_update, model, layout, data, tmp_path / "out", "gradient")
    assert messages[0] == messages[1]
    assert messages[0].startswith("optimizer step 1: the gradient norm is")
    assert "decoder.layers.0.mlp.linear_fc2.weight (rank 0)" in messages[0]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in load_reference(model).named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_a_non_finite_loss_stops_all_ranks_and_names_it(gloo, model, data, tmp_path):
    messages = gloo(2, poisoned_update, model, {"pipeline": 2}, data, tmp_path, "weight")
    assert messages[0] == messages[1]
    assert messages[0].startswith("optimizer step 1: the loss is nan; over 95 tokens log_prob = nan, entropy = nan")


def description_of(place: RankPlace, folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    return start_actor(place, folder, actor_config(layout)).describe()


def test_describe_counts_parameters(gloo, model):
    described = gloo(2, description_of, model, {"pipeline": 2})
    assert described[0]["parameters"] == sum(p.numel() for p in load_reference(model).parameters())
    assert sum(d["parameters_here"] for d in described) == described[0]["parameters"]
    assert described[0]["device"] == "cpu"
    assert {"layers", "optimizer"} < set(described[0]["kernels"])
