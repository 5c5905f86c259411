"""`to-hf` of a LoRA run's checkpoint: the files that the run itself exports, byte for byte."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.config.actor_config import LoraConfig
from tests.actor.gloo import ForkedRanks, shared_pool
from tests.actor.tiny import save_tiny
from tools.convert_checkpoint import import_megatron, main
from tools.rank_pool import RankPlace


def trained(place: RankPlace, folder: Path, layout: dict, dtype: str, lora: dict, run: Path) -> None:
    """Two steps of training, a checkpoint and the actor's own export."""
    from megatron_dapo.algorithm.policy_loss import PolicyObjective
    from tests.actor.mini_batches import TEMPERATURE, actor_config, columns, mini_batch, start_actor

    config = actor_config(layout, optimizer={"lr": 5e-3}, lora=LoraConfig(**lora))
    actor = start_actor(place, folder, config, dtype=dtype)
    batch = mini_batch(columns(folder), config, without=("reference_log_probs", "correction"))
    actor.update([batch] * 2, PolicyObjective(), TEMPERATURE)
    actor.save_checkpoint(run / "checkpoints/step_1/actor")
    actor.export_hf(run / "model")


def run_of(folder: Path, layout: dict, dtype: str, lora: dict, run: Path) -> Path:
    (run / "checkpoints/step_1").mkdir(parents=True)
    (run / "config.yaml").write_text(f"model:\n  path: {folder}\n")
    ranks = max(layout.values(), default=1)
    shared_pool().run(ranks, trained, folder, layout, dtype, lora, run)
    return run


def convert(step: Path, target: Path, *options: str) -> int:
    return main(["to-hf", str(step), str(target), "--processes", "2", *options])


@pytest.mark.parametrize(
    ("family", "tied", "layout", "dtype", "lora"),
    [
        ("qwen2", True, {}, "float32", {"rank": 4, "alpha": 6.0}),
        ("llama", False, {"tensor": 2}, "bfloat16", {"rank": 3, "modules": ("k_proj", "up_proj", "down_proj")}),
        ("qwen3", False, {"pipeline": 2}, "float32", {"rank": 2, "modules": ("o_proj",)}),
    ],
    ids=lambda each: str(each) if isinstance(each, (str, dict)) else "",
)
def test_a_checkpoint_of_adapters_gives_what_the_run_exports(tmp_path, family, tied, layout, dtype, lora):
    base = save_tiny(tmp_path / "base", family, tied=tied)
    run = run_of(base, layout, dtype, lora, tmp_path / "run")
    import_megatron()
    from tools.conversion.directions import to_hf

    options = {"max_file_bytes": 10**9, "dtype": getattr(torch, dtype), "workers": 2, "pool": shared_pool()}
    to_hf(run / "checkpoints/step_1", tmp_path / "out", base=None, **options)
    wanted = {path.relative_to(run / "model"): path.read_bytes() for path in (run / "model").rglob("*.*")}
    assert {path.relative_to(tmp_path / "out"): path.read_bytes() for path in (tmp_path / "out").rglob("*.*")} == wanted
    assert {"model.safetensors", "adapter/adapter_model.safetensors"} < set(map(str, wanted))
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    changed = {name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])}
    assert {name.split(".")[-2] for name in changed} == set(LoraConfig(**lora).modules)


def test_another_base_and_verify_are_refused(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("tools.convert_checkpoint.RankPool", ForkedRanks)
    base, other = save_tiny(tmp_path / "base", "qwen2", tied=True), tmp_path / "other"
    step = run_of(base, {}, "float32", {"rank": 4}, tmp_path / "run") / "checkpoints/step_1"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.001
    save_file(tensors, other / "model.safetensors")
    assert convert(step, tmp_path / "out", "--base", str(other)) == 2
    assert f"were trained on other weights than {other}'s; give --base" in capfd.readouterr().err
    assert convert(step, tmp_path / "out", "--verify") == 2
    assert "--verify compares no LoRA adapters; leave it out" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
