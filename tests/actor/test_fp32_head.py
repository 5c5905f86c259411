"""`model.fp32_head`: below a trunk in bfloat16 the output layer's product, its softmax and both gradients are float64's
within law 1's bounds, on every layout and packing: real Megatron-Core over gloo, the formulas written out here."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import ActorConfig
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.test_step import NONE_OF, size
from tests.actor.tiny import save_tiny
from tools.actor_job import loss_and_gradients

BOUND = 1e-6
"""Law 1's, relative."""

SUMMED = 10 * BOUND
"""Of the weight's gradient: what a micro-batch adds to the float32 sum of those before it."""


Errors = tuple[int, dict[str, float], np.ndarray | None]


def errors_of_head(place: RankPlace, folder: Path, config: ActorConfig, data: Columns) -> Errors:
    """Micro-batches that this rank had logits of, the largest relative errors over them, and log-probs (rank 0)."""
    from megatron.core import parallel_state

    from megatron_dapo.actor.model import log_prob

    actor = start_actor(place, folder, config, dtype="bfloat16", fp32_head=True)
    tensors = load_file(folder / "model.safetensors", device=str(actor.device.device))
    whole = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).bfloat16().double()
    real, group = log_prob.linear_token_log_probs, parallel_state.get_tensor_model_parallel_group()
    worst = dict.fromkeys(("log-probs", "entropies", "hidden", "weight"), 0.0)
    seen = 0

    def relative(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        assert got.isfinite().all()
        if wanted.any():  # else only a truncated response, which has no loss
            worst[name] = max(worst[name], float((got.double() - wanted).norm() / wanted.norm()))
        else:
            assert not got.any()

    def checked(hidden, weight, rows, targets, shard, *, temperature):
        nonlocal seen
        seen += 1
        log_probs, entropy = real(hidden, weight, rows, targets, shard, temperature=temperature)
        assert (hidden.dtype, weight.dtype, log_probs.dtype) == (torch.float32, torch.bfloat16, torch.float32)
        assert torch.equal(hidden, hidden.bfloat16().float()), "the trunk is in bfloat16"
        with torch.enable_grad():
            x, w = hidden.detach().double().requires_grad_(), whole.clone().requires_grad_()
            log_pi = torch.log_softmax(x[rows] @ w.T / temperature, dim=-1)
            theirs = log_pi.gather(1, targets[:, None])[:, 0]
        relative("log-probs", log_probs.detach(), theirs.detach())
        relative("entropies", entropy.detach(), -(log_pi.exp() * log_pi).sum(-1).detach())
        if hidden.requires_grad:
            before: list[torch.Tensor] = []  # of a tied embedding's own gradient too, which comes later

            def upstream(grad: torch.Tensor) -> None:
                before.append(weight.main_grad.clone())
                theirs.backward(grad.double())

            def of_hidden(grad: torch.Tensor) -> None:
                total = grad.double().clone()
                dist.all_reduce(total, group=group)
                relative("hidden", total, x.grad)
                mine = slice(shard.start, shard.start + shard.size)
                relative("weight", (weight.main_grad - before.pop())[: shard.size], w.grad[mine])

            log_probs.register_hook(upstream)
            hidden.register_hook(of_hidden)
        return log_probs, entropy

    log_prob.linear_token_log_probs = checked
    try:
        batch = mini_batch(data, config, without=NONE_OF)
        scored = actor.log_probs(data.responses, batch.plan, TEMPERATURE)
        loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE)
    finally:  # the process serves other tests too
        log_prob.linear_token_log_probs = real
    return seen, worst, None if scored is None else scored.log_probs


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"micro_batch_tokens": 1}),
    ({}, {"micro_batch_tokens": 10_000}),
    ({"tensor": 2}, {}),
    ({"tensor": 2, "sequence_parallel": True}, {"fused_linear_log_prob": True}),
    ({"context": 2}, {}),
    ({"pipeline": 2}, {"recompute": "full"}),
]


def check_head(seen: int, worst: dict[str, float]) -> None:
    assert max(worst["log-probs"], worst["entropies"], worst["hidden"]) < BOUND, worst
    assert worst["weight"] < SUMMED, worst
    assert all((error > 0) == (seen > 0) for error in worst.values()), "all were looked at"


@pytest.mark.parametrize(
    "tied", [pytest.param(False, id="own weight", marks=pytest.mark.slow), pytest.param(True, id="tied")]
)
def test_values_and_gradients_of_the_head_are_float64s(gloo, tmp_path, tied):
    folder = save_tiny(tmp_path, "qwen3", tied=tied)
    data, log_probs = columns(folder), []
    for layout, fields in CASES:
        results = gloo(size(layout), errors_of_head, folder, actor_config(layout, **fields), data)
        assert sum(seen for seen, _, _ in results) > 0
        for seen, worst, _ in results:
            print(layout, fields, worst)
            check_head(seen, worst)
        log_probs.append(results[0][2])
    # What is left between layouts is the trunk's rounding.
    assert max(np.abs(other - log_probs[0]).max() for other in log_probs[1:]) < 0.2


def dtype_of_output(place: RankPlace, folder: Path, dtype: str, fp32_head: bool) -> tuple[torch.dtype, int]:
    actor = start_actor(place, folder, actor_config(), dtype=dtype, fp32_head=fp32_head)
    seen: list[torch.Tensor] = []
    last = actor.optimizer.chunks[-1].module
    last.output_layer.register_forward_hook(lambda module, given, output: seen.append(output[0]))
    data = columns(folder)
    actor.log_probs(data.responses, mini_batch(data, actor_config(), without=NONE_OF).plan, TEMPERATURE)
    return seen[0].dtype, seen[0].shape[-1]


def test_nothing_changes_without_the_key_nor_where_all_is_float32(gloo, tmp_path):
    folder = save_tiny(tmp_path, "qwen2", tied=False)
    for dtype, fp32_head, wanted in (
        ("bfloat16", False, (torch.bfloat16, 101)),
        ("float32", True, (torch.float32, 101)),
        ("bfloat16", True, (torch.float32, 64)),
    ):
        assert gloo(1, dtype_of_output, folder, dtype, fp32_head)[0] == wanted
