"""The actor on one GPU against itself on the CPU, where float64 and transformers have checked it.

float32 takes the layers of PyTorch; bfloat16 TransformerEngine's where it is installed: `kernels` in the figures says
which. Both are compared with float32 on the CPU.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.algorithm.policy_loss import PolicyObjective, SupervisedObjective
from megatron_dapo.config.actor import ActorConfig, OffloadConfig, OptimizerConfig
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, columns, mini_batch, relative_error, start_actor
from tests.gpu.place import DEVICE, ON_CPU, save_small

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

NONE_OF = ("reference_log_probs", "correction")
SUPERVISED = ("advantages", "old_log_probs", *NONE_OF)
FAMILIES = [("qwen2", False), ("qwen3", True), ("llama", False)]


def config_for(device: str, **fields: Any) -> ActorConfig:
    # A large epsilon makes Adam's first steps a smooth function of the gradient, not its sign.
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-2, warmup_rollout_steps=0)
    return ActorConfig(**{"device": device, "micro_batch_tokens": 40, "optimizer": optimizer} | fields)


KINDS = {
    "embedding": ("embed_tokens",),
    "query, key, value": ("q_proj", "k_proj", "v_proj"),
    "attention output": ("o_proj",),
    "MLP": ("gate_proj", "up_proj", "down_proj"),
    "norms": ("norm",),
    "output layer": ("lm_head",),
}
"""Parts of Hugging Face names, by kind of layer."""

BFLOAT16_WHOLE, BFLOAT16_EACH = 0.05, 0.2
"""bfloat16 rounds each value by up to 0.4 %, 0.15 % in the mean square. Some 15 rounded products a layer, forward and
backward, through 4 layers add to about 2 % of the whole gradient; a bias or a norm, whose gradient is a sum of terms of
both signs, loses a few times more of itself."""


def by_kind(errors: dict[str, float]) -> dict[str, float]:
    """The worst relative error of each kind of layer, and of the whole gradient."""
    found = {kind: [e for name, e in errors.items() if any(p in name for p in parts)] for kind, parts in KINDS.items()}
    assert sum(map(len, found.values())) == len(errors) - 1, "every parameter is of one kind"
    return {kind: max(values) for kind, values in found.items() if values} | {"whole": errors[""]}


def gradient_of(
    place: RankPlace, folder: Path, data: Columns, dtype: str, supervised: bool, device: str, fields: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    config = config_for(device, **fields)
    actor = start_actor(place, folder, config, dtype=dtype)
    assert actor.device.device.type == device
    objective = SupervisedObjective() if supervised else PolicyObjective()
    batch = mini_batch(data, config, without=SUPERVISED if supervised else NONE_OF)
    return actor.loss_and_gradients(batch, objective, TEMPERATURE)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("fields", [{}, {"recompute": "full", "fused_linear_log_prob": True}], ids=str)
def test_float32_gradient_is_the_cpus(gloo, on_device, record, family, tied, fields, tmp_path):
    folder = save_small(tmp_path, family, tied=tied)
    data = columns(folder)
    loss, wanted = gloo(1, gradient_of, folder, data, "float32", False, "cpu", {})[0]
    got_loss, got = on_device(gradient_of, folder, data, "float32", False, DEVICE, fields)
    errors = by_kind(relative_error(got, wanted))
    record(f"float32 gradient against the CPU, {family}, {fields}", errors)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    assert errors["whole"] < 1e-5
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("fields", [{}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
def test_bfloat16_gradient_is_near(gloo, on_device, record, family, tied, fields, tmp_path):
    """Cross-entropy: the clip's edge, which a rounded ratio may cross, is left out."""
    folder = save_small(tmp_path, family, tied=tied)
    data = columns(folder)
    loss, wanted = gloo(1, gradient_of, folder, data, "float32", True, "cpu", {})[0]
    got_loss, got = on_device(gradient_of, folder, data, "bfloat16", True, DEVICE, fields)
    errors = by_kind(relative_error(got, wanted))
    record(f"bfloat16 gradient against float32 on the CPU, {family}, {fields}", errors)
    assert got_loss == pytest.approx(loss, rel=0.02)
    assert errors["whole"] < BFLOAT16_WHOLE
    assert max(errors.values()) < BFLOAT16_EACH, errors


def steps_of(place: RankPlace, folder: Path, data: Columns, device: str, dtype: str, offload: dict[str, Any]) -> Any:
    """(loss, norm) of four steps, log-probs after them, those under the starting weights, and the kernels."""
    config = config_for(device, offload=OffloadConfig(**offload))
    actor = start_actor(place, folder, config, dtype=dtype, keep_reference=True)
    batch = mini_batch(data, config, without=NONE_OF)
    reports = actor.update([batch] * 2, PolicyObjective(), TEMPERATURE)
    reference = actor.reference_log_probs(data.responses, batch.plan, TEMPERATURE)
    reports += actor.update([batch] * 2, PolicyObjective(), TEMPERATURE)
    trained = actor.log_probs(data.responses, batch.plan, TEMPERATURE)
    numbers = [(report.loss, report.grad_norm) for report in reports]
    return numbers, trained.log_probs, reference.log_probs, actor.describe()


@pytest.mark.parametrize(("dtype", "near", "nats"), [("float32", 1e-3, 1e-3), ("bfloat16", 0.1, 0.1)])
def test_log_probs_and_steps_are_those_of_the_cpu(gloo, on_device, record, dtype, near, nats, tmp_path):
    """In bfloat16 a log-prob of 10 nats is a difference of logits that are rounded by 0.4 % at each of four layers: a
    few hundredths of a nat in the mean. What Adam makes of a rounded gradient stays within its learning rate."""
    folder = save_small(tmp_path)
    data = columns(folder)
    wanted, wanted_trained, wanted_start, _ = gloo(1, steps_of, folder, data, "cpu", "float32", {})[0]
    got, trained, start, described = on_device(steps_of, folder, data, DEVICE, dtype, {})
    gaps = {
        "start": float(np.abs(start - wanted_start).mean()),
        "trained": float(np.abs(trained - wanted_trained).mean()),
    }
    record(f"kernels, {dtype}", described["kernels"])
    record(f"steps, {dtype}: loss and norm", {str(at): step for at, step in enumerate(map(list, got), 1)})
    record(f"log-probs against the CPU, {dtype}, mean nats", gaps)
    assert described["collectives"] == ("gloo" if ON_CPU else "nccl")
    # The loss is a small difference of large terms; the norm is not.
    np.testing.assert_allclose([norm for _, norm in got], [norm for _, norm in wanted], rtol=near)
    assert max(gaps.values()) < nats


def away_and_back(place: RankPlace, folder: Path, data: Columns, dtype: str) -> dict[str, Any]:
    config = config_for("cuda")
    actor = start_actor(place, folder, config, dtype=dtype, keep_reference=True)
    batch = mini_batch(data, config, without=NONE_OF)
    actor.update([batch], PolicyObjective(), TEMPERATURE)
    inner = actor.optimizer.megatron.chained_optimizers[0].optimizer
    kept = [p for chunk in actor.optimizer.chunks for p in chunk.parameters()]
    kept += [p for group in inner.param_groups for p in group["params"]]
    kept += [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    before = [tensor.detach().clone().cpu() for tensor in kept]
    there = torch.cuda.memory_allocated()
    actor.offload()
    away = torch.cuda.memory_allocated()
    host = [piece for part in actor.memory._host.values() for pieces in part.values() for piece in pieces]
    reference = actor.reference._weights
    actor.onload()
    torch.cuda.synchronize()
    return {
        "there": there,
        "away": away,
        "again": torch.cuda.memory_allocated(),
        "equal": all(torch.equal(a.detach().cpu(), b) for a, b in zip(kept, before, strict=True)),
        "host": all(tensor.is_pinned() and tensor.device.type == "cpu" for tensor in [*host, *reference]),
        "parameters": sum(p.numel() for chunk in actor.optimizer.chunks for p in chunk.parameters()),
    }


@pytest.mark.skipif(ON_CPU, reason="a CPU has no other memory to leave to")
@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 16), ("bfloat16", 18)])
def test_offload_frees_device_memory_to_pinned_host_memory(on_device, record, dtype, bytes_each, tmp_path):
    """Weights, float32 gradients and moments; in bfloat16 master weights too."""
    folder = save_small(tmp_path, tied=False, hidden_size=512, intermediate_size=1024, num_attention_heads=8)
    data = columns(folder)
    seen = on_device(away_and_back, folder, data, dtype)
    record(f"offload, {dtype}", seen)
    assert seen["equal"]
    assert seen["host"]
    assert seen["there"] - seen["away"] > 0.95 * bytes_each * seen["parameters"]
    assert seen["again"] == pytest.approx(seen["there"], rel=0.02)


@pytest.mark.skipif(ON_CPU, reason="as above")
@pytest.mark.parametrize("offload", [{"optimizer_state": True}, {"between_phases": "all"}], ids=str)
def test_training_with_offload_is_training_without(on_device, offload, tmp_path):
    folder = save_small(tmp_path, tied=False)
    data = columns(folder)
    plain, plain_trained, *_ = on_device(steps_of, folder, data, "cuda", "bfloat16", {})
    got, trained, *_ = on_device(steps_of, folder, data, "cuda", "bfloat16", offload)
    # Attention's backward adds in no fixed order.
    np.testing.assert_allclose(np.array(got), np.array(plain), rtol=1e-2, atol=1e-3)
    assert np.abs(trained - plain_trained).mean() < 0.02
