"""Weights in and out: bit-exact in every layout, and refused where they do not fit the model."""

import json
import math
import operator
import resource
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.actor.gloo import RankPlace
from tests.actor.ranks import build
from tests.actor.tiny import FAMILIES, load_reference, random_sequences, save_tiny

LAYOUTS = [
    pytest.param({}, id="one process"),
    pytest.param({"tensor": 2}, id="tensor"),
    pytest.param({"pipeline": 2}, id="pipeline", marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "virtual_pipeline": 2}, id="virtual pipeline"),
    pytest.param({"context": 2}, id="context", marks=pytest.mark.slow),
    pytest.param({"data": 2}, id="data", marks=pytest.mark.slow),
]
SMALL_FILE = 100_000  # bytes: makes an index and several files of a tiny model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    return [
        save_tiny(tmp_path_factory.mktemp(f"{family}-{tied}"), family, tied=tied)
        for family in FAMILIES
        for tied in (False, True)
    ]


def ranks_of(layout: dict) -> int:
    return math.prod(value for key, value in layout.items() if key != "virtual_pipeline")


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(weight_map.values())):
        part = load_file(folder / file)
        assert {name for name, where in weight_map.items() if where == file} == part.keys()
        tensors |= part
    return tensors


def assert_same_tensors(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def export_all(
    place: RankPlace, folders: list[Path], layout: dict, out: Path, options: dict = MappingProxyType({})
) -> None:
    from megatron_dapo.actor.weights.hf_weights import export_hf

    for folder in folders:
        built = build(place, folder, layout)
        export_hf(built.chunks, built.hf, out / folder.name, folder, **{"dtype": torch.float32} | dict(options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_gives_back_what_was_loaded(gloo, models, tmp_path, layout):
    (tmp_path / "models").mkdir()
    gloo(ranks_of(layout), export_all, models, layout, tmp_path / "models")
    for folder in models:
        out = tmp_path / "models" / folder.name
        assert_same_tensors(read_folder(out), read_folder(folder))
        assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert len(list((tmp_path / "models").iterdir())) == len(models)  # nothing is left aside


def test_an_exported_model_loads_in_transformers_and_computes_the_same(gloo, models, tmp_path):
    folder = models[1]
    gloo(2, export_all, [folder], {"tensor": 2}, tmp_path)
    [sequence] = random_sequences([20])
    with torch.no_grad():
        paths = (tmp_path / folder.name, folder)
        ours, theirs = (load_reference(path)(torch.tensor([sequence])).logits for path in paths)
    assert torch.equal(ours, theirs)


def test_a_large_model_is_written_in_several_files_and_loaded_from_them(gloo, models, tmp_path):
    folder = models[0]
    gloo(2, export_all, [folder], {"pipeline": 2}, tmp_path / "first", {"max_file_bytes": SMALL_FILE})
    parts = sorted((tmp_path / "first" / folder.name).glob("*.safetensors"))
    assert len(parts) > 2
    assert parts[0].name == f"model-00001-of-{len(parts):05d}.safetensors"
    assert_same_tensors(read_folder(tmp_path / "first" / folder.name), read_folder(folder))
    gloo(2, export_all, [tmp_path / "first" / folder.name], {"tensor": 2}, tmp_path / "second")
    assert_same_tensors(read_folder(tmp_path / "second" / folder.name), read_folder(folder))


def test_a_bfloat16_export_says_so_in_its_config(gloo, models, tmp_path):
    folder = models[2]
    gloo(1, export_all, [folder], {}, tmp_path, {"dtype": torch.bfloat16})
    out = tmp_path / folder.name
    assert_same_tensors(read_folder(out), {name: t.bfloat16() for name, t in read_folder(folder).items()})
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_export_replaces_the_folder_that_is_there(gloo, models, tmp_path):
    folder = models[0]
    (tmp_path / folder.name).mkdir()
    (tmp_path / folder.name / "stale.safetensors").write_text("old")
    gloo(1, export_all, [folder], {}, tmp_path)
    assert not (tmp_path / folder.name / "stale.safetensors").exists()
    assert_same_tensors(read_folder(tmp_path / folder.name), read_folder(folder))


def test_an_export_that_cannot_be_written_fails_on_every_rank(gloo, models, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for error in gloo(2, export_error, models[0], {"tensor": 2}, tmp_path / "file"):
        assert str(tmp_path / "file") in error


def export_without_room(place: RankPlace, folder: Path, out: Path) -> str:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        return export_error(place, folder, {}, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_export_to_a_full_disk_leaves_it_no_fuller(gloo, models, tmp_path):
    (error,) = gloo(1, export_without_room, models[0], tmp_path)
    assert "File too large" in error
    assert list(tmp_path.iterdir()) == []


def export_error(place: RankPlace, folder: Path, layout: dict, out: Path) -> str:
    try:
        export_all(place, [folder], layout, out)
    except RuntimeError as error:
        return str(error)
    return "no error"


def gathered_twice(place: RankPlace, folder: Path, layout: dict) -> dict[str, torch.Tensor]:
    """What a gradient gather does: a tensor of each parameter's shape that is not the weight."""
    from megatron_dapo.actor.weights.hf_weights import hf_tensors

    built = build(place, folder, layout)
    for chunk in built.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad = 2 * parameter.detach().double()
    value = operator.attrgetter("main_grad")
    gathered = dict(hf_tensors(built.chunks, built.hf, dtype=torch.float64, value=value))
    for chunk in built.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.zero_()  # what was gathered is a copy: it must not change
    return gathered


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"tensor": 2},
        {"pipeline": 2},
        pytest.param({"data": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_anything_of_a_parameters_shape_can_be_gathered(gloo, models, layout):
    for folder in (models[0], models[3]):
        first, *others = gloo(ranks_of(layout), gathered_twice, folder, layout)
        assert_same_tensors(first, {name: 2 * tensor.double() for name, tensor in read_folder(folder).items()})
        assert not any(others)


def try_to_load(place: RankPlace, folder: Path) -> str:
    try:
        build(place, folder, {})
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.fixture
def broken(models, tmp_path):
    """broken(change) -> folder: a copy of the first model whose tensors went through `change`."""

    def make(change) -> Path:
        for file in models[0].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        tensors = load_file(models[0] / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), ["model.layers.2.mlp.up_proj.weight", "missing"]),
        (lambda t: t.pop("model.layers.0.self_attn.k_proj.bias"), ["self_attn.k_proj.bias", "missing", "[32]"]),
        (lambda t: t.update({"model.layers.4.x.weight": torch.zeros(2)}), ["model.layers.4.x.weight", "no place"]),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(100, 64)}),
            ["model.embed_tokens.weight", "[100, 64]", "[101, 64]"],
        ),
    ],
    ids=["missing", "missing bias", "extra", "shape"],
)
def test_tensors_that_do_not_fit_are_refused_by_name_and_file(gloo, broken, change, words):
    folder = broken(change)
    [error] = gloo(1, try_to_load, folder)
    for word in [*words, str(folder / "model.safetensors")]:
        assert word in error


def test_the_head_that_some_tied_models_store_is_accepted(gloo, models, tmp_path):
    tied = models[1]
    for file in tied.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert gloo(1, try_to_load, tmp_path) == ["no error"]
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    [error] = gloo(1, try_to_load, tmp_path)
    assert "tie_word_embeddings = true, but lm_head.weight differs from model.embed_tokens.weight" in error
    from megatron_dapo.diagnostics.evaluation_session import EvaluationError, fingerprint

    with pytest.raises(EvaluationError, match="tie_word_embeddings = true, but"):
        fingerprint(tmp_path)


def test_a_folder_without_weights_is_refused(gloo, models, tmp_path):
    (tmp_path / "config.json").write_bytes((models[0] / "config.json").read_bytes())
    [error] = gloo(1, try_to_load, tmp_path)
    assert str(tmp_path) in error
    assert "model.safetensors" in error
