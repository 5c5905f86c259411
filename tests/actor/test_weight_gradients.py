"""Gradients of bfloat16 weights over many micro-batches: the sum of float32 products, as float64 finds it from what a
layer was given and what came back; rounded at each micro-batch where the product does not sum."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_dapo.actor.device.weight_gradients import wgrad_gemm_accum_fp32
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from tests.actor.gloo import RankPlace, run_ranks
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.tiny import MIXTURE, save_tiny
from tools.actor_job import loss_and_gradients

SUMMED = 1e-6
"""Relative: sums in float32."""

ROUNDED = 1e-3
"""At least: bfloat16 keeps 8 bits of what each micro-batch adds."""


def test_the_product_is_added_in_float32():
    generator = torch.Generator().manual_seed(0)
    rows, grad = (torch.randn(300, size, generator=generator).bfloat16() for size in (40, 24))
    total = torch.full((24, 40), 1000.0)
    wgrad_gemm_accum_fp32(rows, grad, total)
    torch.testing.assert_close(total.double(), 1000 + grad.double().T @ rows.double(), rtol=1e-6, atol=1e-4)
    wgrad_gemm_accum_fp32(rows[:0], grad[:0], total)  # an expert without tokens
    torch.testing.assert_close(total.double(), 1000 + grad.double().T @ rows.double(), rtol=1e-6, atol=1e-4)


def errors(place: RankPlace, folder: Path, data: Columns, fields: dict[str, Any], sums: bool) -> dict[str, float]:
    """Of each linear layer's weight, relative; by module."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megatron_dapo.actor import device

    config = actor_config({}, micro_batch_tokens=40, **fields)
    real = device.prepare_for
    with mock.patch.object(device, "prepare_for", lambda *args: replace(real(*args), gradient_accumulation=sums)):
        actor = start_actor(place, folder, config, dtype="bfloat16")
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    assert len(batch.plan.micro_batches[0]) >= 4
    wanted: dict[str, torch.Tensor] = {}
    layers = {
        name: module
        for name, module in actor.optimizer.chunks[0].named_modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.weight is not None
    }

    def watch(name: str, rows: torch.Tensor, result: tuple[torch.Tensor, Any]) -> None:
        if not result[0].requires_grad:
            return
        rows = rows.detach().flatten(0, -2).double()

        def add(grad: torch.Tensor) -> None:
            wanted[name] = wanted.get(name, 0) + grad.flatten(0, -2).double().T @ rows

        result[0].register_hook(add)

    for name, module in layers.items():
        module.register_forward_hook(lambda module, given, result, name=name: watch(name, given[0], result))
    assert loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE) is not None
    assert wanted.keys() == layers.keys()
    return {
        name: float((layers[name].weight.main_grad.double() - one).norm() / one.norm()) for name, one in wanted.items()
    }


@pytest.mark.parametrize("family", ["qwen2", MIXTURE])
def test_micro_batches_are_summed_without_rounding(family, tmp_path):
    folder = save_tiny(tmp_path / "model", family, tied=False)
    data = columns(folder)
    [summed] = run_ranks(1, errors, folder, data, {}, True)
    [rounded] = run_ranks(1, errors, folder, data, {}, False)
    assert max(summed.values()) < SUMMED, summed
    assert min(rounded.values()) > ROUNDED, rounded
    assert any("output_layer" in name for name in summed)


def output_gradients(place: RankPlace, folder: Path, data: Columns, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of all responses in one micro-batch."""
    config = actor_config({}, micro_batch_tokens=1000, **fields)
    actor = start_actor(place, folder, config, dtype="bfloat16")
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    assert len(batch.plan.micro_batches[0]) == 1
    result = loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE)
    assert result is not None
    return result[1]


@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_from_hidden_states_rounds_nothing_either(tied, tmp_path):
    """It adds to the buffer by itself. A rounded gradient of one micro-batch would have numbers of bfloat16 alone."""
    folder = save_tiny(tmp_path / "model", "qwen3", tied=tied)
    data = columns(folder)
    [plain] = run_ranks(1, output_gradients, folder, data, {})
    [fused] = run_ranks(1, output_gradients, folder, data, {"fused_linear_log_prob": True})
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert float((fused[name] - plain[name]).norm() / plain[name].norm()) < 0.02  # its logits are not rounded
    assert (fused[name] != fused[name].bfloat16().float()).float().mean() > 0.9
