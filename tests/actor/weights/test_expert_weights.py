"""The weights of experts in and out: bit-exact from every rank that holds some, as files and in buckets."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.actor.tiny import MIXTURE, save_tiny
from tests.actor.weights.test_buckets import streamed
from tests.actor.weights.test_hf_weights import SMALL_FILE, assert_same_tensors, export_all, gathered_twice, read_folder

TENSOR = {"tensor": 2, "sequence_parallel": True}
LAYOUTS = [
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "expert": 2}, marks=pytest.mark.slow),
    TENSOR | {"expert": 2},
    TENSOR | {"expert_tensor": 2},
    pytest.param({"context": 2, "expert": 2}, marks=pytest.mark.slow),
    {"pipeline": 2, "data": 2, "expert": 2},
    pytest.param({"pipeline": 2, "virtual_pipeline": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 4, "expert": 2, "expert_tensor": 2}, marks=pytest.mark.slow),
    pytest.param(TENSOR | {"data": 2, "expert": 4}, marks=pytest.mark.slow),
]


def ranks_of(layout: dict) -> int:
    ranks = 1
    for key in ("tensor", "pipeline", "context", "data"):
        ranks *= layout.get(key, 1)
    return ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("moe"), MIXTURE, tied=False)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_files_give_back_what_was_loaded(gloo, model, tmp_path, layout):
    gloo(ranks_of(layout), export_all, [model], layout, tmp_path, {"max_file_bytes": SMALL_FILE})
    out = tmp_path / model.name
    assert len(list(out.glob("*.safetensors"))) > 4
    assert_same_tensors(read_folder(out), read_folder(model))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_buckets_hold_the_experts(gloo, model, layout):
    (tensors, sizes), *others = gloo(ranks_of(layout), streamed, model, layout, 60_000, torch.bfloat16)
    wanted = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    assert_same_tensors(tensors, wanted)
    assert all(size <= 60_000 or parameters == 1 for size, parameters in sizes)
    assert all(other == ({}, []) for other in others)


def test_gradients_are_gathered_too(gloo, model):
    layout = TENSOR | {"expert": 2}
    first, other = gloo(2, gathered_twice, model, layout)
    assert_same_tensors(first, {name: 2 * tensor.double() for name, tensor in read_folder(model).items()})
    assert not other


def test_a_sink_that_fails_keeps_no_holder_of_experts_waiting(gloo, model):
    results = gloo(2, streamed, model, {"data": 2, "expert": 2}, 60_000, torch.float32, 2, timeout_s=60)
    assert results == ["no room", ({}, [])]


@pytest.mark.parametrize("published", [True, False])
def test_the_number_of_experts_under_both_names(gloo, model, tmp_path, published):
    source = tmp_path / "source"
    source.mkdir()
    for file in model.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    fields = json.loads((source / "config.json").read_text())
    count = fields.pop("num_experts", None) or fields.pop("num_local_experts")
    fields["num_experts" if published else "num_local_experts"] = count
    (source / "config.json").write_text(json.dumps(fields))
    gloo(2, export_all, [source], {"data": 2, "expert": 2}, tmp_path / "out")
    assert_same_tensors(read_folder(tmp_path / "out" / "source"), read_folder(model))
    assert json.loads((tmp_path / "out" / "source" / "config.json").read_text()) == fields
