"""Positioned reads and writes against the safetensors library, and files that are cut, wrong or missing."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_dapo.actor.weights.hf_files import FolderPlan, SafetensorsReader, WeightsError

SHAPES = {"a.weight": (7, 5), "b.bias": (3,), "c.weight": (4, 6), "none": (0, 4)}


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_library_reads_what_is_written_in_any_order(tmp_path, dtype):
    plan = FolderPlan(shapes=SHAPES, dtype=dtype, max_bytes=10**6)
    plan.create(tmp_path)
    expected = tensors(dtype)
    for name in reversed(SHAPES):
        plan.write(tmp_path, name, expected[name])
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == dtype for name in expected)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    save_file(tensors(torch.bfloat16), folder / "model.safetensors")
    return folder


@given(st.sampled_from(["a.weight", "c.weight"]), st.integers(0, 1), st.data())
def test_any_slice_is_the_librarys(written, name, dim, data):
    size = SHAPES[name][dim]
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    with SafetensorsReader(written) as reader:
        got = reader.read(name, dim, start, stop)
    assert torch.equal(got, load_file(written / "model.safetensors")[name].narrow(dim, start, stop - start))
    assert got.is_contiguous()


def test_a_tensor_that_was_not_planned_so_is_refused(tmp_path):
    plan = FolderPlan(shapes=SHAPES, dtype=torch.float32, max_bytes=10**6)
    plan.create(tmp_path)
    with pytest.raises(
        WeightsError, match=r"c.weight is planned as \(4, 6\), got \(torch.Size\(\[6, 4\]\), torch.float32"
    ):
        plan.write(tmp_path, "c.weight", torch.zeros(6, 4))
    with pytest.raises(WeightsError, match=r"torch\.bfloat16"):
        plan.write(tmp_path, "c.weight", torch.zeros(4, 6, dtype=torch.bfloat16))


@pytest.mark.parametrize("cut", [1, 100])
def test_a_cut_file_is_refused(written, tmp_path, cut):
    file = tmp_path / "model.safetensors"
    file.write_bytes((written / "model.safetensors").read_bytes()[:-cut])
    with pytest.raises(WeightsError, match=rf"{file}: .*; fetch it again"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 20,
        (8).to_bytes(8, "little") + b"not json",
        (4).to_bytes(8, "little") + b"[1] ",
        (14).to_bytes(8, "little") + b'{"t": {"a":1}}',
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(WeightsError, match=f"{file}: "):
        SafetensorsReader(tmp_path)


def test_a_type_that_is_not_known_is_refused_with_the_tensors_name(tmp_path):
    text = json.dumps({"t": {"dtype": "U16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(WeightsError, match="tensor t has type U16"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"b": {"data_offsets": [-4, 4]}},
        {"b": {"data_offsets": [4, 12]}},
        {"b": {"data_offsets": ["8", "16"]}},
        {"b": {"data_offsets": [8]}},
        {"a": {"shape": [-2]}},
        {"a": {"shape": [2.0]}},
    ],
    ids=str,
)
def test_a_header_whose_tensors_lie_outside_their_places_is_refused(tmp_path, changes):
    """Bytes of the header, or of another tensor, would be read as weights."""
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]} | changes.get(name, {})
        for name, at in (("a", 0), ("b", 8))
    }
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(WeightsError, match=f"{file}: "):
        SafetensorsReader(tmp_path)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two files and an index."""
    plan = FolderPlan(shapes=SHAPES, dtype=torch.float32, max_bytes=160)
    plan.create(tmp_path / "model")
    for name, tensor in tensors(torch.float32).items():
        plan.write(tmp_path / "model", name, tensor)
    assert len(plan.headers) == 2
    return tmp_path / "model"


def test_a_file_that_the_index_names_and_is_not_there(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00002.safetensors: "):
        SafetensorsReader(folder)


@pytest.mark.parametrize(("place", "words"), [(5, r"index.json is damaged"), (".", r"model: .*; fetch it again")])
def test_an_index_that_places_a_tensor_in_no_file(folder, place, words):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["c.weight"] = place
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=words):
        SafetensorsReader(folder)


def test_a_damaged_index_is_named(folder):
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightsError, match=r"model.safetensors.index.json is damaged"):
        SafetensorsReader(folder)
