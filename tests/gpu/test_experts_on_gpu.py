"""A mixture of experts on a GPU: TransformerEngine's grouped experts against the CPU's sequence of them, SGLang's fused
experts and the routing that they tell against transformers, and the speed of an update.

The trainer's experts are told (routing replay): rounding would send some tokens elsewhere.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.quickstart.supervised import SupervisedObjective
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.plan.trainer_time import forward_flops
from rollout.generation import Generation, RoutingShape
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, columns, mini_batch, relative_error, start_actor
from tests.actor.model.test_routing_replay import foreign
from tests.actor.tiny import MIXTURE, load_reference
from tests.gpu.place import DEVICE, ON_CPU, answers, requests, save_small, serve
from tests.gpu.publishing import VOCABULARY
from tests.gpu.test_actor_on_gpu import OF_CPUS_BFLOAT16, SUPERVISED, config_for
from tests.gpu.test_server_on_gpu import NEAR, compare
from tests.gpu.test_throughput_on_gpu import PEAK_FLOPS, ROWS, SEQUENCES, actor_update
from tests.rollout.test_real_experts_told import probabilities
from tools.actor_job import loss_and_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

DTYPE = "float32" if ON_CPU else "bfloat16"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
LAYERS = 4
"""Of the small model, as `foreign` takes them."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("experts") / "model", MIXTURE, tied=False, **EXPERTS)


def experts_held(place: RankPlace, folder: Path, device: str, dtype: str) -> dict[str, tuple[int, ...]]:
    """Names within the first layer, and shapes, of the experts' parameters."""
    actor = start_actor(place, folder, config_for(device), dtype=dtype)
    named = actor._chunks[0].named_parameters()
    return {name.partition("layers.0.")[2]: tuple(p.shape) for name, p in named if "layers.0.mlp.experts." in name}


def test_names_and_shapes_are_those_that_weights_are_read_by(on_device, record, small):
    held = on_device(experts_held, small, DEVICE, DTYPE)
    record("experts' parameters of a layer", {name: list(shape) for name, shape in held.items()})
    fc1, fc2 = (2 * 128, 256), (256, 128)
    grouped = {f"mlp.experts.linear_fc{at}.weight{number}" for at in (1, 2) for number in range(8)}
    alone = {f"mlp.experts.local_experts.{number}.linear_fc{at}.weight" for at in (1, 2) for number in range(8)}
    assert held.keys() == (alone if ON_CPU else grouped)
    assert {shape for name, shape in held.items() if "linear_fc1" in name} == {fc1}
    assert {shape for name, shape in held.items() if "linear_fc2" in name} == {fc2}


def gradient_of(
    place: RankPlace, folder: Path, data: Columns, dtype: str, device: str, fields: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    config = config_for(device, routing_replay=True, **fields)
    actor = start_actor(place, folder, config, dtype=dtype)
    return loss_and_gradients(actor, mini_batch(data, config, without=SUPERVISED), SupervisedObjective(), TEMPERATURE)


PARTS = {"experts": ".experts.", "router": "mlp.gate.", "the rest": ""}


def by_part(errors: dict[str, float]) -> dict[str, float]:
    """The worst relative error of experts, routers and all else, and of the whole gradient."""
    worst: dict[str, float] = {"whole": errors[""]}
    for name, error in errors.items():
        part = next(part for part, piece in PARTS.items() if piece in name)
        worst[part] = max(error, worst.get(part, 0.0))
    return worst


@pytest.mark.parametrize("fields", [{}, {"recompute": "full"}, {"optimizer": None}], ids=str)
def test_the_gradient_of_told_experts_is_near_the_cpus(gloo, on_device, record, fields, small):
    """The last case is without the distributed optimizer, which moves a router's weight to the GPU besides."""
    if "optimizer" in fields:
        fields = {"optimizer": replace(config_for(DEVICE).optimizer, distributed=False)}
    data = columns(small)
    data = replace(data, responses=replace(data.responses, routing=foreign(data.responses)))
    loss, wanted = gloo(1, gradient_of, small, data, "float32", "cpu", {})[0]
    _, rounded = gloo(1, gradient_of, small, data, "bfloat16", "cpu", {})[0]
    got_loss, got = on_device(gradient_of, small, data, DTYPE, DEVICE, fields)
    errors, bounds = by_part(relative_error(got, wanted)), by_part(relative_error(rounded, wanted))
    record(f"gradient of experts against the CPU, {DTYPE}, {fields}", {"errors": errors, "the CPU's bfloat16": bounds})
    assert got_loss == pytest.approx(loss, rel=0.02)
    assert not {part: error for part, error in errors.items() if error > OF_CPUS_BFLOAT16 * bounds[part]}


@pytest.mark.skipif(ON_CPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "expert": 2},
        {"tensor": 2, "sequence_parallel": True, "expert": 2},
        {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2},
    ],
    ids=str,
)
def test_experts_on_two_gpus_are_one(on_device, record, layout, small):
    data = columns(small)
    data = replace(data, responses=replace(data.responses, routing=foreign(data.responses)))
    _, wanted = on_device(gradient_of, small, data, DTYPE, DEVICE, {})
    _, got = on_device(gradient_of, small, data, DTYPE, DEVICE, {"layout": LayoutConfig(**layout)}, ranks=2)
    errors = by_part(relative_error(got, wanted))
    record(f"experts, {layout}, {DTYPE}: gradient against one GPU", errors)
    assert errors["whole"] < 0.2


def test_a_server_answers_and_tells_the_experts_that_it_used(record, small, tmp_path):
    """In bfloat16 a token may go to an expert that is nearly as probable."""
    shape = RoutingShape(layers=LAYERS, top_k=2, experts=8)
    asked = [replace(one, routing=shape) for one in requests(16, 32)]

    async def work(fleet: Any) -> list[Generation]:
        return await answers(fleet, asked)

    drawn = serve(small, tmp_path / "server.log", DTYPE, work, routed_experts=True)
    found = compare(small, asked, drawn)
    model, same, rows = load_reference(small), 0, 0
    for one, answer in zip(asked, drawn, strict=True):
        ids = np.concatenate([one.prompt_ids, answer.token_ids])
        assert answer.routing is not None
        assert answer.routing.shape == (ids.size - 1, LAYERS, 2)
        best = probabilities(model, ids)[:-1].argsort(-1)[..., -2:]
        same += int((np.sort(best, -1) == np.sort(answer.routing, -1)).all(-1).sum())
        rows += best[..., 0].size
    record("server with experts against transformers", found | {"rows that are the reference's": same / rows})
    assert found["mean gap"] < 2 * NEAR[DTYPE]
    assert same / rows > (0.999 if DTYPE == "float32" else 0.9)


WIDE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
}
"""Qwen3-30B-A3B's width, four of its layers."""


def test_an_update_at_true_width(on_device, record, tmp_path):
    """What `expert_efficiency` of the planner's calibration takes from a published figure is measured here."""
    row = 512 if ON_CPU else 16384
    shape = EXPERTS | {"num_hidden_layers": 2} if ON_CPU else WIDE
    folder = save_small(tmp_path / "model", MIXTURE, tied=False, **shape)
    hf = HFModelConfig.load(folder)
    found = on_device(actor_update, folder, row, hf.hidden_size, {})
    shutil.rmtree(folder)
    lengths = np.full(SEQUENCES * ROWS, row // SEQUENCES)
    gpu = "" if ON_CPU else torch.cuda.get_device_name()
    peak = next((value for name, value in PEAK_FLOPS.items() if name in gpu), None)
    found["tokens_per_second"] = round(lengths.sum() / found["seconds"])
    found["mfu"] = peak and 3 * float(forward_flops(hf, lengths).sum()) / found["seconds"] / peak
    record(f"update of experts at {hf.hidden_size} wide, rows of {row}", found)
    assert found["seconds"] > 0
    if peak:
        assert found["mfu"] > 0.05
