"""Memory that leaves the device is really free, comes back bit for bit, and training does not notice.

On the CPU "the device" is the tensors' own memory: it must be gone, not only copied.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import OffloadConfig
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.tiny import save_tiny
from tools.actor_job import loss_and_gradients

NONE_OF = ("reference_log_probs", "correction")
ALL = ("parameters", "gradients", "optimizer")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


def tensors_of(actor: Any) -> dict[str, list[torch.Tensor]]:
    """The actor's large tensors, found without the code under test."""
    parameters = [p for chunk in actor.optimizer.chunks for p in chunk.module.parameters()]
    inner = actor.optimizer.megatron.chained_optimizers[0].optimizer
    moments = [inner.state[p][name] for p in inner.state for name in ("exp_avg", "exp_avg_sq")]
    return {
        "parameters": [p.data for p in parameters],
        "gradients": [p.main_grad for p in parameters],
        "optimizer": moments,
        "master": [p for group in inner.param_groups for p in group["params"]],
    }


def away_of(actor: Any) -> tuple[str, ...]:
    """Parts that are off the device."""
    return tuple(part for part in ALL if part in actor.memory._away)


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def away_and_back(place: RankPlace, folder: Path, data: Columns, dtype: str, layout: dict, distributed: bool) -> dict:
    from megatron_dapo.actor import offload

    offload.PIECE_BYTES = 50_000  # several pieces, and a rest
    config = actor_config(layout, optimizer={"distributed": distributed})
    actor = start_actor(place, folder, config, dtype=dtype)
    actor.update([mini_batch(data, config, without=NONE_OF)], PolicyObjective(), TEMPERATURE)
    tensors = tensors_of(actor)
    before = {name: [t.clone() for t in group] for name, group in tensors.items()}
    sizes = [storage_bytes(group) for group in tensors.values()]
    actor.memory.offload(*ALL)
    actor.memory.offload(*ALL)  # a second time changes nothing
    away, empty = away_of(actor), [storage_bytes(group) for group in tensors.values()]
    # What the freed memory holds next is not what comes back by chance.
    blocks = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    actor.memory.onload(*ALL)
    del blocks
    return {
        "sizes": sizes,
        "away": away,
        "empty": empty,
        "again": [storage_bytes(group) for group in tensors.values()],
        "equal": {
            name: all(torch.equal(a, b) for a, b in zip(tensors[name], before[name], strict=True))
            for name in ("parameters", "optimizer", "master")
        },
        "gradients": [float(t.abs().max()) for t in tensors["gradients"]],
        "left": away_of(actor),
    }


@pytest.mark.parametrize(
    ("dtype", "layout", "distributed"),
    [
        pytest.param("bfloat16", {}, True, marks=pytest.mark.slow),
        pytest.param("float32", {}, False, marks=pytest.mark.slow),
        ("float32", {"data": 2}, True),
        ("bfloat16", {"tensor": 2}, True),
    ],
    ids=str,
)
def test_memory_is_released_and_comes_back_bit_for_bit(gloo, dtype, layout, distributed, model, data):
    ranks = int(np.prod([*layout.values(), 1]))
    for seen in gloo(ranks, away_and_back, model, data, dtype, layout, distributed):
        assert min(seen["sizes"]) > 10_000
        assert seen["away"] == ALL
        assert seen["empty"] == [0, 0, 0, 0]
        assert seen["again"] == seen["sizes"]
        assert seen["equal"] == {"parameters": True, "optimizer": True, "master": True}
        assert set(seen["gradients"]) == {0.0}
        assert seen["left"] == ()


def train(place: RankPlace, folder: Path, data: Columns, offload: dict, options: dict, target: Path) -> dict:
    config = actor_config(options.get("layout"), offload=OffloadConfig(**offload), optimizer=options.get("optimizer"))
    actor = start_actor(place, folder, config, dtype=options["dtype"], keep_reference=True)
    batch = mini_batch(data, config, without=NONE_OF)
    away = [away_of(actor)]
    results = {"start": actor.log_probs(data.responses, batch.plan, TEMPERATURE)}
    away.append(away_of(actor))
    reports = actor.update([batch, batch], PolicyObjective(), TEMPERATURE)
    away.append(away_of(actor))
    results["reference"] = actor.reference_log_probs(data.responses, batch.plan, TEMPERATURE)
    reports += actor.update([batch], PolicyObjective(), TEMPERATURE)
    actor.save_checkpoint(target / "checkpoint")
    away.append(away_of(actor))
    actor.update([batch], PolicyObjective(), TEMPERATURE)
    actor.load_checkpoint(target / "checkpoint")
    reports += actor.update([batch], PolicyObjective(), TEMPERATURE)
    away.append(away_of(actor))
    actor.export_hf(target / "export")
    results["trained"] = actor.log_probs(data.responses, batch.plan, TEMPERATURE)
    gradient = loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE)
    away.append(away_of(actor))
    numbers = [(report.loss, report.grad_norm, report.optimizer_step) for report in reports]
    return {"away": away, "results": results, "reports": numbers, "gradient": gradient and gradient[1]}


OFFLOADS = [
    ({"optimizer_state": True}, ("optimizer",)),
    ({"between_phases": "optimizer"}, ("gradients", "optimizer")),
    ({"between_phases": "all"}, ALL),
    ({"between_phases": "all", "optimizer_state": True}, ALL),
]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"dtype": "float32", "optimizer": {"distributed": False}},
        pytest.param({"dtype": "bfloat16", "layout": {"data": 2}}, marks=pytest.mark.slow),
        pytest.param({"dtype": "float32", "layout": {"tensor": 2}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_with_offload_is_bit_equal_to_training_without(gloo, options, model, data, tmp_path):
    ranks = int(np.prod([*options.get("layout", {}).values(), 1]))
    plain = gloo(ranks, train, model, data, {}, options, tmp_path / "plain")[0]
    assert set(plain["away"]) == {()}
    for number, (offload, at_rest) in enumerate(OFFLOADS if ranks == 1 else OFFLOADS[-1:]):
        got = gloo(ranks, train, model, data, offload, options, tmp_path / str(number))[0]
        assert set(got["away"]) == {at_rest}
        assert got["reports"] == plain["reports"]
        for name, wanted in plain["results"].items():
            np.testing.assert_array_equal(got["results"][name].log_probs, wanted.log_probs)
        for name, wanted in plain["gradient"].items():
            torch.testing.assert_close(got["gradient"][name], wanted, rtol=0, atol=0)


def resident_bytes_in_the_passes(place: RankPlace, folder: Path, data: Columns, offload: dict) -> dict[str, int]:
    """Bytes that optimizer and gradients occupy while forward and backward run, and while the optimizer steps."""
    config = actor_config(offload=OffloadConfig(**offload))
    actor = start_actor(place, folder, config, dtype="bfloat16")
    batch = mini_batch(data, config, without=NONE_OF)
    actor.update([batch], PolicyObjective(), TEMPERATURE)  # from here on there are moments
    seen: dict[str, int] = {}

    def look(name: str) -> None:
        groups = tensors_of(actor)
        seen[name] = storage_bytes(groups["optimizer"] + groups["master"])
        seen[f"{name}, gradients"] = storage_bytes(groups["gradients"])

    actor.optimizer.chunks[0].module.register_forward_hook(lambda *_: look("forward"))
    inner = actor.optimizer.megatron.chained_optimizers[0].optimizer
    inner.register_step_pre_hook(lambda *_: look("step"))
    actor.log_probs(data.responses, batch.plan, TEMPERATURE)
    seen["log-probs, gradients"] = seen["forward, gradients"]
    actor.update([batch], PolicyObjective(), TEMPERATURE)
    return seen


def test_optimizer_state_is_on_the_device_for_the_step_alone(gloo, model, data):
    [plain] = gloo(1, resident_bytes_in_the_passes, model, data, {})
    [kept_off] = gloo(1, resident_bytes_in_the_passes, model, data, {"optimizer_state": True})
    assert plain["forward"] == plain["step"] == kept_off["step"] > 0
    assert kept_off["forward"] == 0


def test_between_phases_the_update_has_all_and_log_probs_no_gradients(gloo, model, data):
    [seen] = gloo(1, resident_bytes_in_the_passes, model, data, {"between_phases": "optimizer"})
    assert seen["forward"] == seen["step"] > 0
    assert seen["forward, gradients"] > 0
    assert seen["log-probs, gradients"] == 0
