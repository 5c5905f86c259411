"""Less of the optimizer's state on a GPU: the step on the CPU, and compact state by TransformerEngine's FusedAdam."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import ActorConfig, OptimizerConfig
from megatron_dapo.plan.rank_state import rank_state
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, columns, mini_batch, start_actor
from tests.gpu.place import ON_CPU, save_small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(150),
    pytest.mark.skipif(ON_CPU, reason="a CPU's optimizer is on the CPU, in float32"),
]

WITH_TE = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="compact state needs TransformerEngine's FusedAdam"
)
WAYS = [
    pytest.param({"on_cpu": True}, id="on CPU"),
    pytest.param({"compact": "weights"}, id="weights", marks=WITH_TE),
    pytest.param({"compact": "all"}, id="all", marks=WITH_TE),
]


def config_of(**fields: Any) -> ActorConfig:
    # After large steps the gradient is so small that bfloat16's rounding is as large.
    optimizer = OptimizerConfig(lr=1e-4, eps=1e-2, betas=(0.9, 0.98), warmup_rollout_steps=0, **fields)
    return ActorConfig(device="cuda", micro_batch_tokens=40, optimizer=optimizer, threads=4)


def steps(place: RankPlace, folder: Path, data: Columns, fields: dict[str, Any], out: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, two more, and the first of these again after a load; with the device's bytes."""
    config = config_of(**fields)
    actor = start_actor(place, folder, config, dtype="bfloat16")
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))

    def update(count: int) -> list[float]:
        return [each.grad_norm for each in actor.update([batch] * count, PolicyObjective(), TEMPERATURE)]

    norms = update(2)
    resident = torch.cuda.memory_allocated()
    states = [state for inner in actor.optimizer._inner for state in inner.optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    state = sum(value.nbytes for value in tensors if value.is_cuda)
    actor.memory.offload("parameters", "gradients", "optimizer")
    away = torch.cuda.memory_allocated()
    actor.memory.onload("parameters", "gradients", "optimizer")
    actor.save_checkpoint(out)
    norms += update(2)
    actor.load_checkpoint(out)
    return {"norms": norms, "again": update(1)[0], "resident": resident, "state": state, "offloaded": resident - away}


@pytest.mark.parametrize("fields", WAYS)
def test_steps_are_near_and_the_state_takes_what_is_planned(on_device, record, fields, tmp_path):
    folder = save_small(tmp_path / "model", tied=False, hidden_size=512, intermediate_size=1024, num_attention_heads=8)
    data = columns(folder)
    usual = on_device(steps, folder, data, {}, tmp_path / "usual")
    found = on_device(steps, folder, data, fields, tmp_path / "found")
    record(f"optimizer, {fields}", {"usual": usual, "found": found})
    # Other kernels, and bfloat16 weights that are rounded the other way now and then.
    assert found["norms"] == pytest.approx(usual["norms"], rel=0.05)
    # Attention's backward adds in no fixed order.
    assert found["again"] == pytest.approx(found["norms"][2], rel=0.02)
    planned = [rank_state(HFModelConfig.load(folder), config_of(**each), "bfloat16", stage=0) for each in ({}, fields)]
    in_use = [state.master_weights + state.moments for state in planned]
    if "on_cpu" in fields:
        in_use[1] = 0
        assert found["state"] == 0
    else:
        assert found["state"] == pytest.approx(in_use[1], rel=0.02)
    assert usual["resident"] - found["resident"] == pytest.approx(in_use[0] - in_use[1], rel=0.1)
    assert usual["offloaded"] - found["offloaded"] == pytest.approx(in_use[0] - in_use[1], rel=0.1)


@pytest.mark.parametrize("written_on_cpu", [True, False])
def test_a_checkpoint_goes_on_on_the_other_side(on_device, record, written_on_cpu, tmp_path):
    folder = save_small(tmp_path / "model", tied=False)
    data = columns(folder)
    written = on_device(steps, folder, data, {"on_cpu": written_on_cpu}, tmp_path / "step")
    got = on_device(next_norm, folder, data, {"on_cpu": not written_on_cpu}, tmp_path / "step")
    record(f"resume, written on the CPU: {written_on_cpu}", {"there": written["norms"][2], "here": got})
    assert got == pytest.approx(written["norms"][2], rel=0.02)


def next_norm(place: RankPlace, folder: Path, data: Columns, fields: dict[str, Any], source: Path) -> float:
    config = config_of(**fields)
    actor = start_actor(place, folder, config, dtype="bfloat16")
    actor.load_checkpoint(source)
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    return actor.update([batch], PolicyObjective(), TEMPERATURE)[0].grad_norm
