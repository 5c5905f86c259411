"""Conversion both ways: bit for bit at any cut, loaded by Megatron and transformers, wrong sources refused by name."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.actor.step_data import CheckpointError
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.config.base import ConfigError
from tests.actor.gloo import ForkedRanks, shared_pool
from tests.actor.tiny import FAMILIES, MIXTURE, save_tiny
from tools.convert_checkpoint import import_megatron, main
from tools.rank_pool import RankPlace, RankPool

BASE = Path(__file__).parents[2] / "examples" / "quickstart" / "base"
SMALL_FILE = 100_000


@pytest.fixture(scope="module")
def pool() -> RankPool:
    return shared_pool()


@pytest.fixture(scope="module")
def tool(pool) -> SimpleNamespace:
    """The tool's functions on two processes; Megatron may only be imported once its device is prepared."""
    import_megatron()
    from tools.conversion.directions import to_hf, to_megatron
    from tools.conversion.verify import verify_logits, verify_tensors

    def there(source: Path, target: Path, *, tensor: int = 1, dtype: torch.dtype | None = None):
        return to_megatron(source, target, tensor=tensor, dtype=dtype, workers=2, pool=pool)

    def back(source: Path, target: Path, *, base: Path | None = None, dtype: torch.dtype | None = None):
        return to_hf(source, target, base=base, max_file_bytes=SMALL_FILE, dtype=dtype, workers=2, pool=pool)

    return SimpleNamespace(
        to_megatron=there,
        to_hf=back,
        verify_tensors=lambda *folders, dtype: verify_tensors(*folders, dtype=dtype, workers=2, pool=pool),
        verify_logits=lambda *folders, **layout: verify_logits(*folders, layout=LayoutConfig(**layout), pool=pool),
    )


@pytest.fixture
def forks(monkeypatch) -> None:
    """The command's own processes begin as forks; `test_verify_holds_where_another_type_is_written` has real ones."""
    monkeypatch.setattr("tools.convert_checkpoint.RankPool", ForkedRanks)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen2", tied=False)


@pytest.fixture(scope="module")
def checkpoint(tool, model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "checkpoint"
    tool.to_megatron(model, folder, tensor=2)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(got: Path, expected: Path, dtype: torch.dtype | None = None) -> None:
    theirs, ours = tensors_of(expected), tensors_of(got)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        cast = tensor.to(dtype or tensor.dtype)
        assert ours[name].dtype == cast.dtype, name
        assert torch.equal(ours[name], cast), name


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


@pytest.mark.parametrize(
    ("family", "tied"), [*((family, tied) for family in FAMILIES for tied in (False, True)), (MIXTURE, False)]
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_round_trip_is_bit_exact(tool, tmp_path, family, tied, tensor):
    """The vocabulary of 101 is padded at two ranks."""
    source = save_tiny(tmp_path / "source", family, tied=tied)
    assert tool.to_megatron(source, tmp_path / "megatron", tensor=tensor) == torch.float32
    tool.to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_same(tmp_path / "back", source)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "megatron", "source"]  # nothing is left aside


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
def test_megatron_loads_it_at_any_layout_and_computes_what_transformers_computes(tool, tmp_path, layout):
    tool.to_megatron(BASE, tmp_path / "megatron", tensor=2)
    assert tool.verify_logits(BASE, tmp_path / "megatron", **layout) < 1e-5


@pytest.mark.parametrize(
    "layout",
    [{}, {"tensor": 2, "sequence_parallel": True, "expert": 2}, {"pipeline": 2}],
    ids=str,
)
def test_megatron_loads_experts_at_any_layout(tool, tmp_path, layout):
    source = save_tiny(tmp_path / "source", MIXTURE, tied=False, vocab_size=102)
    tool.to_megatron(source, tmp_path / "megatron", tensor=2)
    assert tool.verify_logits(source, tmp_path / "megatron", **layout) < 1e-5
    tool.verify_tensors(source, tmp_path / "megatron", dtype=torch.float32)


def trained(place: RankPlace, folder: Path, layout: dict, dtype: str, checkpoint: Path, exported: Path) -> None:
    """A step of training, then a checkpoint and the actor's own export."""
    from megatron_dapo.algorithm.policy_loss import PolicyObjective
    from tests.actor.mini_batches import TEMPERATURE, actor_config, columns, mini_batch, start_actor

    config = actor_config(layout, optimizer={"lr": 5e-3, "warmup_rollout_steps": 1})
    actor = start_actor(place, folder, config, dtype=dtype)
    batch = mini_batch(columns(folder), config, without=("reference_log_probs", "correction"))
    actor.update([batch], PolicyObjective(), TEMPERATURE)
    actor.save_checkpoint(checkpoint)
    actor.export_hf(exported)


@pytest.mark.parametrize(
    ("family", "tied", "layout", "dtype"),
    [
        ("qwen2", False, {"tensor": 2}, "float32"),
        ("qwen3", True, {"pipeline": 2, "virtual_pipeline": 2}, "float32"),
        ("llama", False, {"data": 2}, "bfloat16"),
        (MIXTURE, False, {"data": 2, "expert": 2}, "bfloat16"),
        (MIXTURE, False, {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2}, "float32"),
    ],
)
def test_a_runs_checkpoint_gives_what_the_actor_exports(tool, pool, tmp_path, family, tied, layout, dtype):
    source = save_tiny(tmp_path / "source", family, tied=tied)
    step = tmp_path / "run" / "checkpoints" / "step_1"
    step.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(f"model:\n  path: {source}\n")
    pool.run(2, trained, source, layout, dtype, step / "actor", tmp_path / "exported")
    assert tool.to_hf(step, tmp_path / "back") == getattr(torch, dtype)
    assert_same(tmp_path / "back", tmp_path / "exported")
    assert any(not torch.equal(a.to(b), b) for a, b in zip(*map(_sorted, (source, tmp_path / "back")), strict=True))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == dtype


def _sorted(folder: Path) -> list[torch.Tensor]:
    return [tensor for _, tensor in sorted(tensors_of(folder).items())]


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
def test_another_type_is_written_where_it_is_asked_for(tool, model, tmp_path, way):
    options = {"to_megatron": {}, "to_hf": {}} | {way: {"dtype": torch.bfloat16}}
    tool.to_megatron(model, tmp_path / "megatron", **options["to_megatron"])
    tool.to_hf(tmp_path / "megatron", tmp_path / "back", **options["to_hf"])
    assert_same(tmp_path / "back", model, torch.bfloat16)


@pytest.mark.parametrize("source_type", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_verify_holds_where_another_type_is_written(tmp_path, source_type, capfd):
    """Both sides' weights are rounded to it before their logits are compared; both ways."""
    source = save_tiny(tmp_path / "source", "llama", tied=False)
    tensors = {name: tensor.to(source_type) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors")
    bare = ["--processes", "1", "--verify"]
    there = ["to-megatron", str(source), str(tmp_path / "megatron"), *bare, "--dtype", "bfloat16"]
    assert main(there) == 0
    if source_type == torch.float32:
        assert main(["to-megatron", str(source), str(tmp_path / "whole"), *bare]) == 0
        back = ["to-hf", str(tmp_path / "whole"), str(tmp_path / "back"), *bare, "--dtype", "bfloat16"]
        assert main(back) == 0
        assert_same(tmp_path / "back", source, torch.bfloat16)
    assert "logits of" in capfd.readouterr().err


def test_quantized_weights_are_refused_whatever_type_is_asked_for(tool, model, tmp_path):
    source = copy_of(model, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor model.norm.weight has type I8, as quantized"):
        tool.to_megatron(source, tmp_path / "megatron", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model.layers.1.mlp.up_proj.weight is missing"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].half()}), "tensor lm_head.weight has type.*float16"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bfloat16()}),
            "tensor model.norm.weight has type torch.bfloat16, others torch.float32",
        ),
        (lambda t: t.update({"extra": torch.zeros(1)}), "tensor extra .* has no place"),
    ],
)
def test_a_wrong_model_is_refused_with_the_tensors_name(tool, model, tmp_path, change, words):
    source = copy_of(model, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        tool.to_megatron(source, tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_layout_that_does_not_divide_the_model_is_refused(tool, model, tmp_path):
    with pytest.raises(ConfigError, match="num_key_value_heads = 2"):
        tool.to_megatron(model, tmp_path / "megatron", tensor=4)


def test_a_flipped_bit_is_found_and_the_file_is_named(tool, checkpoint, tmp_path):
    broken = copy_of(checkpoint, tmp_path / "broken")
    file = broken / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file} is damaged"):
        tool.to_hf(broken, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_missing_file_is_named(tool, checkpoint, tmp_path, file):
    broken = copy_of(checkpoint, tmp_path / "broken")
    (broken / file).unlink()
    with pytest.raises(CheckpointError, match=rf"{broken / file} is missing"):
        tool.to_hf(broken, tmp_path / "back")


def test_the_config_of_another_model_is_refused_with_the_tensors_name(tool, checkpoint, tmp_path):
    other = save_tiny(tmp_path / "deeper", "qwen2", tied=False, num_hidden_layers=8)
    with pytest.raises(ValueError, match=r"decoder.layers\S+ has shape \[4, .*needs \[8"):
        tool.to_hf(checkpoint, tmp_path / "back", base=other)
    other = save_tiny(tmp_path / "family", "qwen3", tied=False, head_dim=16)
    with pytest.raises(ValueError, match=r"q_layernorm\.weight is missing"):
        tool.to_hf(checkpoint, tmp_path / "back", base=other)


def test_a_checkpoint_without_config_asks_for_it(tool, checkpoint, model, tmp_path):
    bare = copy_of(checkpoint, tmp_path / "a" / "b" / "c" / "bare")
    shutil.rmtree(bare / "hf")
    with pytest.raises(ConfigError, match="give --base"):
        tool.to_hf(bare, tmp_path / "back")


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("command", ["to-megatron", "to-hf"])
def test_a_layout_that_verify_cannot_load_is_refused_before_the_conversion(model, checkpoint, tmp_path, capfd, command):
    source, target = {"to-megatron": model, "to-hf": checkpoint}[command], tmp_path / "target"
    assert main([command, str(source), str(target), "--processes", "1", "--verify", "--pipeline", "3"]) == 2
    assert "must divide the model's num_hidden_layers = 4" in capfd.readouterr().err
    assert not target.exists()


def test_verify_names_a_tensor_that_differs(tool, checkpoint, model, tmp_path):
    from tools.conversion.verify import VerifyError

    assert tool.verify_tensors(model, checkpoint, dtype=torch.float32) == len(tensors_of(model))
    other = copy_of(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.2.self_attn.v_proj.weight"][3, 4] *= 1.0001
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(VerifyError, match=r"1 tensors differ .* model.layers.2.self_attn.v_proj.weight"):
        tool.verify_tensors(other, checkpoint, dtype=torch.float32)


def resuming(place: RankPlace, folder: Path, checkpoint: Path) -> str:
    from tests.actor.mini_batches import actor_config, start_actor

    with pytest.raises(CheckpointError) as caught:
        start_actor(place, folder, actor_config({})).load_checkpoint(checkpoint)
    return str(caught.value)


def test_no_run_goes_on_from_a_model_without_an_optimizer(pool, checkpoint, model):
    assert "holds a model without optimizer state" in pool.run(1, resuming, model, checkpoint)[0]


@pytest.mark.slow
def test_the_command(tool, tmp_path, capfd):
    """Both ways with --verify; a target that is there; a difference gives exit code 1."""
    there = ["to-megatron", str(BASE), str(tmp_path / "megatron"), "--processes", "2", "--verify"]
    assert main(there) == 0
    told = capfd.readouterr().err
    assert "46 tensors are equal, bit for bit" in told
    assert "logits of" in told
    assert "Loading" not in told, "a bar's semaphore would be left by its worker"
    assert main(there) == 2
    assert "is there already; give --overwrite" in capfd.readouterr().err
    back = ["to-hf", str(tmp_path / "megatron"), str(tmp_path / "back"), "--processes", "1", "--tensor", "2"]
    assert main([*back, "--verify", "--max-file-gb", "0.001"]) == 0
    assert_same(tmp_path / "back", BASE)
    weights = {path.name for path in (tmp_path / "back").glob("model*")}
    assert len(weights) > 3  # and the index, from which transformers loaded them
    assert {path.name for path in (tmp_path / "back").iterdir()} - weights == (
        {path.name for path in BASE.iterdir()} - {"model.safetensors"}
    )
    assert main(["to-hf", str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 2


@pytest.mark.usefixtures("forks")
def test_a_target_of_its_own_is_replaced_and_an_empty_folder_is_taken(tool, model, tmp_path):
    target = tmp_path / "megatron"
    target.mkdir()
    for _ in range(2):
        assert main(["to-megatron", str(model), str(target), "--processes", "1", "--overwrite"]) == 0
    tool.to_hf(target, tmp_path / "back")
    assert_same(tmp_path / "back", model)


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
def test_a_disk_without_room_is_named_before_anything_is_written(tool, model, checkpoint, tmp_path, monkeypatch, way):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=rf"{tmp_path}/new/target: \d+ MB .* 0 MB are free in {tmp_path}; name"):
        getattr(tool, way)({"to_megatron": model, "to_hf": checkpoint}[way], tmp_path / "new" / "target")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["to_megatron", "to_hf"])
def test_what_a_failed_conversion_wrote_does_not_stay(tool, model, checkpoint, tmp_path, monkeypatch, way):
    def stop(*_, **__):
        raise KeyboardInterrupt

    from tools.conversion import directions

    monkeypatch.setattr(directions, "run_parts", stop)
    with pytest.raises(KeyboardInterrupt):
        getattr(tool, way)({"to_megatron": model, "to_hf": checkpoint}[way], tmp_path / "target")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_is_the_reason_that_is_given(tool, tmp_path):
    """`torch.save` fails a second time while it closes what it has begun."""
    from tools.conversion.megatron_files import PartWriter

    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        PartWriter(tmp_path / "full").add("key", (0, 0), torch.zeros(1, 2**20))


def test_a_config_without_a_model_asks_for_the_base(tool, checkpoint, tmp_path):
    bare = copy_of(checkpoint, tmp_path / "checkpoints" / "step_1" / "actor")
    shutil.rmtree(bare / "hf")
    (tmp_path / "config.yaml").write_text("other: 1\n")
    with pytest.raises(ConfigError, match=r"config.yaml: says no model.path .* give --base"):
        tool.to_hf(bare, tmp_path / "back")


@pytest.mark.parametrize("folder", ["where the run was started", "here"])
def test_a_relative_model_path_begins_where_the_run_was_started_or_here(tmp_path, monkeypatch, folder):
    from tools.conversion.directions import base_of

    run, started = tmp_path / "run", tmp_path / "started"
    for each in (run / "checkpoints" / "step_1" / "actor", started / "base", tmp_path / "elsewhere"):
        each.mkdir(parents=True)
    (run / "config.yaml").write_text("model: {path: base}\n")
    monkeypatch.chdir(started if folder == "here" else tmp_path / "elsewhere")
    if folder != "here":
        with pytest.raises(ConfigError, match=r"model\.path = base is not here; give --base"):
            base_of(run / "checkpoints" / "step_1" / "actor")
        (run / "manifest.json").write_text(json.dumps({"folder": str(started)}))
    assert base_of(run / "checkpoints" / "step_1" / "actor").resolve() == started / "base"
