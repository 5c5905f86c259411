"""The whole actor over the strict group, on tensors of the emulated device, held against one process on plain gloo.

The process chooses what it chooses on CUDA (NCCL, overlapped gradient reduction, deallocated pipeline outputs), but
for the kernels that a CPU does not have.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import LoraConfig, OffloadConfig
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.model.test_routing_replay import foreign
from tests.actor.tiny import MIXTURE, save_tiny
from tests.emulated.strict_ranks import Broken
from tools.actor_job import loss_and_gradients
from tools.rank_pool import RankPlace

NONE_OF = ("reference_log_probs", "correction")
OPTIMIZER = {"lr": 2e-2, "eps": 1e-2, "clip_norm": 0.5, "weight_decay": 0.3, "betas": (0.8, 0.9)}
"""A large epsilon makes Adam's first steps a smooth function of the gradient, not its sign."""

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


@contextmanager
def chosen_as_on_cuda() -> Iterator[None]:
    """The actor's choice of device, as CUDA makes it."""
    from megatron_dapo.actor import device

    real = device.prepare_for

    def prepare_for(config: Any, dtype: Any) -> device.DeviceChoice:
        chosen = device.choose(dataclasses.replace(config, device="cuda"), dtype, device.Found(index=0))
        overlap = chosen.overlap_grad_reduce
        return dataclasses.replace(real(config, dtype), device=GPU, backend="nccl", overlap_grad_reduce=overlap)

    device.prepare_for = prepare_for
    try:
        yield
    finally:
        device.prepare_for = real


class Kept:
    """A sink that keeps the stream's tensors, in buffers on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.held = device, {}

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def put(self, bucket: Any, tensors: Any) -> None:
        self.held |= {name: tensor.cpu().float().numpy().copy() for name, tensor in tensors.items()}


class Spread(Kept):
    """One of every rank's: each bucket comes from rank 0, as with servers beside the ranks."""

    def buffer(self, size: int) -> torch.Tensor:
        self.memory = super().buffer(size)
        return self.memory

    def put(self, bucket: Any, tensors: Any) -> None:
        dist.broadcast(self.memory, src=0)
        super().put(bucket, tensors)


def life(place: RankPlace, folder: Path, layout: dict[str, Any], fields: dict[str, Any], data: Columns, out: Path):
    """All that a run asks of an actor, in one; on rank 0 what came out of it, by name."""
    optimizer = OPTIMIZER | {"distributed": fields.pop("distributed", False)} | fields.pop("optimizer", {})
    dtype = fields.pop("dtype", "float32")
    config = actor_config(layout, optimizer=optimizer, **fields)
    actor = start_actor(place, folder, config, dtype=dtype)
    batch = mini_batch(data, config, without=NONE_OF)
    found: dict[str, Any] = {}

    def note(name: str, value: Any) -> None:
        if place.rank == 0:
            found[name] = value

    def log_probs(name: str) -> None:
        result = actor.log_probs(data.responses, batch.plan, TEMPERATURE)
        note(name, None if result is None else result.log_probs)

    def gradient(name: str) -> None:
        result = loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE)
        note(name, None if result is None else {name: value.numpy() for name, value in result[1].items()})

    def update(name: str, steps: int = 2) -> None:
        # Two steps: only the second gathers weights while its forward runs.
        reports = actor.update([batch] * steps, PolicyObjective(), TEMPERATURE)
        note(name, np.array([[report.loss, report.grad_norm] for report in reports]))

    log_probs("log-probs")
    gradient("gradient")
    update("first update")
    actor.memory.offload("parameters", "gradients", "optimizer")
    update("second update")
    actor.memory.onload("parameters", "gradients", "optimizer")
    log_probs("log-probs after two updates")
    gradient("gradient after two updates")
    actor.save_checkpoint(out / "two")
    update("third update", 1)
    assert actor.begin_checkpoint(out / "three")
    update("fourth update", 1)
    actor.finish_checkpoint()
    actor.load_checkpoint(out / "two")
    update("third update again", 1)
    sink = Kept(actor.device.device)
    actor.stream_weights(sink if place.rank == 0 else None, 20_000)
    note("weights", sink.held)
    everywhere = Spread(actor.device.device)
    actor.stream_weights(everywhere, 20_000)
    found["weights of every rank"] = everywhere.held
    watched_on: set[torch.device] = set()
    actor.export_hf(out / "export", watch=lambda name, tensor: watched_on.add(tensor.device))
    assert watched_on == ({actor.device.device} if place.rank == 0 else set()), "before the copy to the host"
    actor.close()
    return found


def strict_life(place: RankPlace, *args: Any) -> tuple[dict[str, Any], list[tuple[str, str]], set[str]]:
    """The same over the strict group; with the calls that were made, and the backends of all groups."""
    from tests.emulated import strict_nccl

    made: set[str] = set()
    with chosen_as_on_cuda(), pytest.MonkeyPatch.context() as patch:
        c10d = dist.distributed_c10d
        helper = c10d._new_process_group_helper

        def noting(*given: Any, **options: Any) -> Any:
            made.add(str(options.get("backend", given[3] if len(given) > 3 else "")))
            return helper(*given, **options)

        patch.setattr(c10d, "_new_process_group_helper", noting)
        found = life(place, *args)
    assert strict_nccl.faults == []
    return found, list(strict_nccl.log), made


@pytest.fixture(scope="module")
def one_process(gloo, model, data, tmp_path_factory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What one process on plain gloo computes, and the weights that it exports."""
    out = tmp_path_factory.mktemp("one")
    (found,) = gloo(1, life, model, {}, {}, data, out)
    return found, exported(out)


def exported(out: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in (out / "export").glob("*.safetensors") for name, value in load_file(file).items()}


def check(found: dict[str, Any], weights: dict[str, torch.Tensor], wanted: dict[str, Any], theirs: Any) -> None:
    """Equal to what one process gives, and to itself after a resume."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        got, right = found[name], wanted[name]
        if isinstance(right, dict):
            assert got.keys() == right.keys()
            error = np.sqrt(sum(((got[key] - right[key]) ** 2).sum() for key in right))
            assert error / np.sqrt(sum((right[key] ** 2).sum() for key in right)) < 1e-5, name
        else:
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5, err_msg=name)
    assert weights.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=2e-6)
    check_itself(found, weights)


def check_itself(found: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """A resume repeats an update bit for bit; what is streamed is what is exported."""
    np.testing.assert_array_equal(found["third update"], found["third update again"])
    for name, array in found["weights"].items():
        np.testing.assert_array_equal(array, weights[name].float().numpy(), err_msg=name)


DISTRIBUTED = {"distributed": True}
TENSOR = {"tensor": 2, "sequence_parallel": True}

LAYOUTS = [
    pytest.param(TENSOR, {"micro_batch_tokens": 80}, id="tensor"),  # two micro-batches: each costs seconds
    pytest.param({"pipeline": 2, "virtual_pipeline": 2}, {}, id="virtual pipeline"),
]

SLOW_LAYOUTS = [
    pytest.param({"data": 2}, DISTRIBUTED, id="data"),
    pytest.param({"data": 2}, {}, id="data, plain optimizer"),
    pytest.param(TENSOR, DISTRIBUTED, id="tensor, distributed optimizer"),
    pytest.param({"pipeline": 2}, {"offload": OffloadConfig(between_phases="all")}, id="pipeline"),
    pytest.param({"pipeline": 2}, DISTRIBUTED, id="pipeline, distributed optimizer"),
    pytest.param({"context": 2}, DISTRIBUTED | {"recompute": "full"}, id="context"),
    pytest.param({"context": 2}, {}, id="context, plain optimizer"),
    pytest.param({"tensor": 2, "pipeline": 2}, DISTRIBUTED, id="tensor and pipeline"),
    pytest.param(TENSOR | {"pipeline": 2}, {}, id="tensor and pipeline, plain optimizer"),
    pytest.param({"data": 2, "pipeline": 2}, DISTRIBUTED, id="data and pipeline"),
    pytest.param({"data": 2, "pipeline": 2, "virtual_pipeline": 2}, DISTRIBUTED, id="data and virtual pipeline"),
    pytest.param({"data": 2, "pipeline": 2}, {}, id="data and pipeline, plain optimizer"),
]


def run_layout(strict: Any, layout: dict[str, Any], fields: dict[str, Any], *args: Any) -> dict[str, Any]:
    """What rank 0 found. `args`: model, data, and the folder for what the actor writes."""
    model, data, out = args
    ranks = int(np.prod([layout.get(name, 1) for name in ("tensor", "pipeline", "context", "data")]))
    results = strict(ranks, strict_life, model, layout, fields, data, out)
    broken = "\n".join(result.trace for result in results if isinstance(result, Broken))
    assert not broken, broken
    found, calls, made = results[0]
    assert made == {"nccl"}, "no group beside NCCL's"
    assert len(calls) > 20
    return found


@pytest.mark.parametrize(("layout", "fields"), LAYOUTS)
def test_an_actor_over_nccl_lives_as_one_process_does(strict, one_process, layout, fields, model, data, tmp_path):
    found = run_layout(strict, layout, fields, model, data, tmp_path)
    check(found, exported(tmp_path), *one_process)


ADAPTERS = {"lora": LoraConfig(rank=4)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        pytest.param({"data": 2}, DISTRIBUTED | {"offload": OffloadConfig(between_phases="all")}, id="data"),
        pytest.param(TENSOR, {}, id="tensor"),
    ],
)
def test_adapters_live_as_in_one_process(strict, gloo, layout, fields, model, data, tmp_path):
    (wanted,) = gloo(1, life, model, {}, dict(ADAPTERS), data, tmp_path / "one")
    found = run_layout(strict, layout, fields | ADAPTERS, model, data, tmp_path / "strict")
    check(found, exported(tmp_path / "strict"), wanted, exported(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        pytest.param({"data": 2, "expert": 2}, {"recompute": "full"}, id="expert"),
        pytest.param(TENSOR | {"expert": 2}, {}, id="tensor and expert"),
        pytest.param(TENSOR | {"expert_tensor": 2}, {}, id="expert tensor"),
        pytest.param({"data": 4, "expert": 2, "expert_tensor": 2}, {}, id="expert and data"),
        pytest.param({"data": 2, "pipeline": 2, "expert": 2}, {}, id="pipeline and expert"),
    ],
)
def test_experts_live_as_in_one_process(strict, gloo, layout, fields, tmp_path):
    """Told ones: rounding would send some tokens elsewhere."""
    model = save_tiny(tmp_path / "model", MIXTURE, tied=False, num_hidden_layers=2)
    told = columns(model)
    told = dataclasses.replace(told, responses=dataclasses.replace(told.responses, routing=foreign(told.responses)))
    fields = DISTRIBUTED | {"routing_replay": True} | fields
    (wanted,) = gloo(1, life, model, {}, dict(fields), told, tmp_path / "one")
    found = run_layout(strict, layout, fields, model, told, tmp_path / "strict")
    check(found, exported(tmp_path / "strict"), wanted, exported(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "fields"), SLOW_LAYOUTS)
def test_on_every_layout(strict, one_process, layout, fields, model, data, tmp_path):
    found = run_layout(strict, layout, fields, model, data, tmp_path)
    check(found, exported(tmp_path), *one_process)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "fields"), [({"data": 2}, DISTRIBUTED), (TENSOR, {})], ids=["data", "tensor"])
def test_in_bfloat16(strict, one_process, layout, fields, model, data, tmp_path):
    """As on CUDA: with master weights. Only near what one process computes in float32."""
    found = run_layout(strict, layout, fields | {"dtype": "bfloat16"}, model, data, tmp_path)
    wanted, _ = one_process
    np.testing.assert_allclose(found["log-probs"], wanted["log-probs"], atol=0.1)
    check_itself(found, exported(tmp_path))
