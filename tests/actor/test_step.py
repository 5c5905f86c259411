"""Law 1: the gradient of a mini-batch is that of the whole objective, on every layout, budget and packing.

Real Megatron-Core over gloo against transformers' forward in float64 with eq. 8 written out in `mini_batches`. The
models are random and float32; a wrong denominator, a token counted twice or a rank left out shows up as 1e-2 or more.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.quickstart.supervised import SupervisedObjective
from megatron_dapo.algorithm.losses.clipped import Clipped
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import (
    TEMPERATURE,
    Columns,
    actor_config,
    columns,
    eq8_loss,
    mini_batch,
    reference_gradient,
    reference_log_probs,
    relative_error,
    start_actor,
)
from tests.actor.ranks import build
from tests.actor.tiny import load_reference, save_tiny
from tools.actor_job import loss_and_gradients

NONE_OF = ("reference_log_probs", "correction")
FULL = PolicyObjective(
    kl_coefficient=0.3, kl_estimator="k2", kl_aggregation="sequence", entropy_coefficient=0.2, loss=Clipped(dual=3.0)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=False)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


@pytest.fixture(scope="module")
def one_process(gloo, model, data):
    """Gradient on one rank; several tests compare with it."""
    return gloo(1, gradients_of, model, {}, data)[0]


@pytest.fixture(scope="module")
def tolerance(one_process, model, data) -> float:
    """Law 1's 1e-6; where a CPU's kernels round more coarsely, what two float32 gradients differ by that are both as
    far from float64's as one process's is."""
    rounding = relative_error(one_process, reference_gradient(model, data))[""]
    assert rounding < 2e-6
    return max(1e-6, 2 * rounding)


def gradients_of(
    place: RankPlace,
    folder: Path,
    layout: dict[str, Any],
    data: Columns,
    objective: Any = None,
    without: tuple[str, ...] = NONE_OF,
    fields: dict[str, Any] | None = None,
):
    """Rank 0: the gradient by Hugging Face name."""
    config = actor_config(layout, **(fields or {}))
    actor = start_actor(place, folder, config)
    batch = mini_batch(data, config, without=without)
    result = loss_and_gradients(actor, batch, objective or PolicyObjective(), TEMPERATURE)
    return None if result is None else result[1]


LAYOUTS = [
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"pipeline": 2},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"data": 2},
    {"context": 2},
]
FOUR = [
    {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
    {"data": 2, "tensor": 2},
    {"context": 2, "pipeline": 2},
    {"context": 2, "data": 2},
    {"context": 2, "tensor": 2, "sequence_parallel": True},
    {"data": 2, "pipeline": 2, "virtual_pipeline": 2},
]


def size(layout: dict[str, Any]) -> int:
    return int(np.prod([layout.get(name, 1) for name in ("tensor", "pipeline", "context", "data")]))


def test_one_process_has_the_gradient_of_eq_8(one_process, model, data):
    errors = relative_error(one_process, reference_gradient(model, data))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_gradient_does_not_depend_on_the_layout(gloo, layout, one_process, tolerance, model, data):
    errors = relative_error(gloo(size(layout), gradients_of, model, layout, data)[0], one_process)
    assert errors[""] < tolerance
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR, ids=str)
def test_the_gradient_does_not_depend_on_the_layout_of_four(gloo, layout, one_process, tolerance, model, data):
    errors = relative_error(gloo(4, gradients_of, model, layout, data, timeout_s=240)[0], one_process)
    assert errors[""] < tolerance
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize(
    "fields",
    [
        {"micro_batch_tokens": 10_000},
        {"micro_batch_tokens": 1},
        {"logprob_chunk_tokens": None},
        {"recompute": "full"},
        {"recompute": 2},
        {"recompute": ["mlp", "core_attn"]},
        {"fused_linear_log_prob": True},
        {"optimizer": {"distributed": False}},
    ],
    ids=str,
)
def test_nor_on_packing_chunks_and_recompute(gloo, fields, one_process, tolerance, model, data):
    errors = relative_error(gloo(1, gradients_of, model, {}, data, None, NONE_OF, fields)[0], one_process)
    assert errors[""] < tolerance
    assert max(errors.values()) < 5e-6, errors


def gradients_in_blocks(place: RankPlace, folder: Path, data: Columns):
    config = actor_config({"tensor": 2, "sequence_parallel": True})
    actor = start_actor(place, folder, config)
    actor.passes.row_multiple = 16
    widths = []
    actor.optimizer.chunks[0].module.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    result = loss_and_gradients(actor, mini_batch(data, config, without=NONE_OF), PolicyObjective(), TEMPERATURE)
    return widths, None if result is None else result[1]


def test_nor_on_rows_padded_to_blocks(gloo, one_process, tolerance, model, data):
    widths, gradient = gloo(2, gradients_in_blocks, model, data)[0]
    assert widths
    assert not any(width % 32 for width in widths)
    errors = relative_error(gradient, one_process)
    assert errors[""] < tolerance
    assert max(errors.values()) < 5e-6, errors


def gradients_in_bfloat16(place: RankPlace, folder: Path, data: Columns):
    config = actor_config()
    actor = start_actor(place, folder, config, dtype="bfloat16")
    result = loss_and_gradients(actor, mini_batch(data, config, without=NONE_OF), SupervisedObjective(), TEMPERATURE)
    return result[1]


def test_in_bfloat16_the_gradient_is_near(gloo, model, data):
    """Against float64 with the same, unrounded weights. 8 bits through four layers; the objective has no clip, whose
    edge a rounded ratio may cross."""
    supervised = Columns(responses=data.responses, columns={"weights": data.columns["weights"]})
    model_64 = load_reference(model).double()
    log_probs, _ = reference_log_probs(model_64, data.responses)
    (-torch.from_numpy(data.columns["weights"]) * log_probs).sum().backward()
    wanted = {name: parameter.grad for name, parameter in model_64.named_parameters()}
    errors = relative_error(gloo(1, gradients_in_bfloat16, model, supervised)[0], wanted)
    assert errors[""] < 0.05
    assert max(errors.values()) < 0.15, errors


def output_and_gradient(place: RankPlace, folder: Path, data: Columns, layout: dict[str, Any], fused: bool):
    """Last dimension of what the last stage's output layer gives (0 elsewhere), log-probs, and the gradient."""
    config = actor_config(layout, fused_linear_log_prob=fused)
    actor = start_actor(place, folder, config)
    last = actor.optimizer.chunks[-1].module
    widths = [0]
    if last.post_process:
        last.output_layer.register_forward_hook(lambda module, given, output: widths.append(output[0].shape[-1]))
    batch = mini_batch(data, config, without=NONE_OF)
    log_probs = actor.log_probs(data.responses, batch.plan, TEMPERATURE)
    result = loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE)
    return max(widths), log_probs, None if result is None else result[1]


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        ({}, False),
        ({"tensor": 2}, True),
        pytest.param({"tensor": 2, "sequence_parallel": True}, False, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2}, True, marks=pytest.mark.slow),
        ({"context": 2}, False),
    ],
    ids=str,
)
def test_fused_linear_holds_no_logits_and_changes_nothing(gloo, tmp_path, layout, tied):
    folder = save_tiny(tmp_path, "qwen3", tied=tied)
    data = columns(folder)
    results = gloo(size(layout), output_and_gradient, folder, data, layout, True)
    assert max(width for width, _, _ in results) == 64  # the hidden size
    errors = relative_error(results[0][2], reference_gradient(folder, data))
    assert max(errors.values()) < 1e-5, errors
    plain = gloo(size(layout), output_and_gradient, folder, data, layout, False)
    assert max(width for width, _, _ in plain) == (51 if "tensor" in layout else 101)
    np.testing.assert_allclose(results[0][1].log_probs, plain[0][1].log_probs, atol=1e-5)
    np.testing.assert_allclose(results[0][1].entropy, plain[0][1].entropy, atol=1e-5)


def gradients_with_overlap(place: RankPlace, folder: Path, data: Columns) -> tuple[float, float]:
    """As on CUDA, where gradients are reduced while backward still runs: loss and gradient norm."""
    built = build(place, folder, {"data": 2})
    from megatron_dapo.actor.optimizer import ActorOptimizer
    from megatron_dapo.actor.step import ForwardBackward
    from megatron_dapo.actor.step_data import LearningRate

    config = actor_config({"data": 2})
    optimizer = ActorOptimizer(built.chunks, config.optimizer, LearningRate(peak=1e-3), overlap=True)
    passes = ForwardBackward(
        optimizer.chunks, replace(config, logprob_chunk_tokens=8), vocabulary=101, device=torch.device("cpu")
    )
    for _ in range(2):  # the second time over buffers that were used
        optimizer.zero_grad()
        sums = passes.backward(mini_batch(data, config, without=NONE_OF), PolicyObjective(), TEMPERATURE)
    grad_norm, _ = optimizer.step()
    return sums["loss"], grad_norm


def test_overlapped_reduction(gloo, model, data):
    loss, norm = gloo(2, gradients_with_overlap, model, data)[0]
    wanted = reference_gradient(model, data)
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in wanted.values()]).norm()), rel=1e-5)
    log_probs, _ = reference_log_probs(load_reference(model), data.responses)
    assert loss == pytest.approx(float(eq8_loss(log_probs.detach(), data)), rel=1e-5)


def one_response(data: Columns) -> Columns:
    length = int(data.responses.response_lengths[0])
    return Columns(
        responses=data.responses.select(np.array([0])),
        columns={name: column[:length].copy() for name, column in data.columns.items()},
    )


@pytest.mark.parametrize(
    "layout", [{"data": 2}, pytest.param({"data": 2, "context": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_rank_without_responses_does_no_harm(gloo, layout, model, data):
    single = one_response(data)
    wanted = gloo(1, gradients_of, model, {}, single)[0]
    errors = relative_error(gloo(size(layout), gradients_of, model, layout, single)[0], wanted)
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("layout", [{"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}], ids=str)
def test_other_families_and_tied_weights(gloo, tmp_path, family, layout):
    folder = save_tiny(tmp_path, family, tied=True)
    data = columns(folder)
    errors = relative_error(gloo(2, gradients_of, folder, layout, data)[0], reference_gradient(folder, data))
    assert max(errors.values()) < 1e-5, errors


def full_reference(folder: Path, data: Columns) -> dict[str, torch.Tensor]:
    """Gradient of FULL with importance correction, every term written out for whole responses."""
    model = load_reference(folder).double()
    log_probs, entropy = reference_log_probs(model, data.responses)
    column = {name: torch.from_numpy(values).double() for name, values in data.columns.items()}
    ratio, advantage = torch.exp(log_probs - column["old_log_probs"]), column["advantages"]
    surrogate = -torch.min(ratio * advantage, ratio.clip(0.8, 1.28) * advantage)
    surrogate = torch.where(advantage < 0, torch.min(surrogate, -3.0 * advantage), surrogate)
    lengths = data.responses.response_lengths.tolist()
    kl = [
        (part.sum() ** 2 / 2 / len(part)).expand(len(part))
        for part in (log_probs - column["reference_log_probs"]).split(lengths)
    ]
    loss = column["correction"] * surrogate + 0.3 * torch.cat(kl) - 0.2 * entropy
    (column["weights"] * loss).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layout", [{}, {"context": 2}, {"tensor": 2}], ids=str)
def test_every_term_of_the_objective(gloo, layout, model, data):
    """Correction, dual clip, entropy bonus, and KL of whole responses, which context parallelism cuts in two."""
    got = gloo(size(layout), gradients_of, model, layout, data, FULL, ())[0]
    errors = relative_error(got, full_reference(model, data))
    assert max(errors.values()) < 1e-5, errors


def test_supervised(gloo, model, data):
    without = ("advantages", "old_log_probs", *NONE_OF)
    got = gloo(2, gradients_of, model, {"pipeline": 2}, data, SupervisedObjective(), without)[0]
    reference = load_reference(model).double()
    log_probs, _ = reference_log_probs(reference, data.responses)
    (-log_probs * torch.from_numpy(data.columns["weights"]).double()).sum().backward()
    errors = relative_error(got, {name: parameter.grad for name, parameter in reference.named_parameters()})
    assert max(errors.values()) < 1e-5, errors
