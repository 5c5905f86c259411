"""The whole loop by each way to the servers: the same run, number for number, and no file where none is needed.

`colocated` runs by file and by memory are compared in test_quickstart.py."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dapo.cli.exit_codes import ExitCode
from tests.processes import ROOT, Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = (
    "run.rollout_steps=2",
    "algorithm.prompts_per_step=6",
    "algorithm.mini_batch_responses=16",
    "evaluation.limit=8",
    "run.export_at_end=false",
    "rollout.sync_bucket_mb=1",
    "actor.layout.tensor=2",
    "actor.layout.data=1",
    "rollout.servers=1",
)
TIMES = ("timing/", "tokens_per_second/", "weight_sync/gb_per_s", "weight_sync/st", "servers/")


def finished_run(folder: Path, transport: str, *overrides: str) -> list[dict]:
    """Its metrics, without those that are times."""
    config = str(ROOT / "examples" / "quickstart" / "dapo.yaml")
    arguments = ("train", config, f"run.dir={folder}", f"rollout.weight_sync={transport}", *SMALL, *overrides)
    finished = Running(*arguments, log=folder.with_suffix(".txt")).finish(400)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert finished.left_behind == ()
    assert "it reads from disk" not in finished.output
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["weight_sync/gb_per_s"] > 0 for line in lines)
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def test_every_way_gives_the_same_run(tmp_path: Path) -> None:
    by_disk = finished_run(tmp_path / "disk", "disk")
    assert [line["weight_version"] for line in by_disk] == [1, 2]
    assert (tmp_path / "disk" / "weights" / "v2").is_dir()
    assert finished_run(tmp_path / "group", "distributed") == by_disk
    assert not (tmp_path / "group" / "weights").exists()
    log = (tmp_path / "group" / "logs" / "server0.log").read_text()
    assert log.count("init custom process group") == 1, "one group for all publishes"


def test_each_stage_sends_its_part_of_the_same_run(tmp_path: Path) -> None:
    stages = ("actor.layout.tensor=1", "actor.layout.pipeline=2", "rollout.servers=2")
    by_disk, by_groups, changes = (
        finished_run(tmp_path / way, way, *stages) for way in ("disk", "distributed", "delta")
    )
    assert [line["weight_version"] for line in by_disk] == [1, 2]
    assert by_groups == by_disk
    assert [line.pop("weight_sync/changed") for line in changes] == [1.0, 1.0]
    assert changes == [{key: value for key, value in line.items() if key != "weight_sync/changed"} for line in by_disk]
    log = (tmp_path / "distributed" / "logs" / "server0.log").read_text()
    assert log.count("init custom process group") == 2, "a group for each stage, for all publishes"


def test_changes_alone_give_the_same_run(tmp_path: Path) -> None:
    """In bfloat16 at a small learning rate few values change; every publish is verified."""
    small = ("model.dtype=bfloat16", "actor.optimizer.lr=1e-5", "run.rollout_steps=3")
    whole, changes = (finished_run(tmp_path / way, way, *small) for way in ("distributed", "delta"))
    shares = [line.pop("weight_sync/changed") for line in changes]
    assert all(0 < share < 0.2 for share in shares)
    assert [line.pop("weight_sync/changed") for line in whole] == [1.0] * 3
    assert changes == whole
    assert not (tmp_path / "delta" / "weights").exists()


def with_experts(folder: Path) -> Path:
    """The quickstart's base with four experts a layer, each nearly its MLP, and random routers: it answers as well."""
    base = ROOT / "examples" / "quickstart" / "base"
    shutil.copytree(base, folder)
    fields = json.loads((base / "config.json").read_text())
    del fields["layer_types"]
    fields |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "tie_word_embeddings": False}
    fields |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    fields |= {"moe_intermediate_size": fields["intermediate_size"]}
    (folder / "config.json").write_text(json.dumps(fields))
    random, tensors = torch.Generator().manual_seed(0), load_file(base / "model.safetensors")
    made = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    for name, tensor in tensors.items():
        layer, of_mlp, part = name.partition(".mlp.")
        if not of_mlp:
            made[name] = tensor
            continue
        made[f"{layer}.mlp.gate.weight"] = 0.1 * torch.randn(4, fields["hidden_size"], generator=random)
        for number in range(4):
            noise = 0.01 * tensor.std() * torch.randn(tensor.shape, generator=random)
            made[f"{layer}.mlp.experts.{number}.{part}"] = tensor + noise
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_experts_on_two_ranks_learn_the_same_by_file_and_by_memory(tmp_path: Path) -> None:
    """Every publish is verified; the engine's log-probs are the trainer's."""
    layout = ("actor.layout.tensor=1", "actor.layout.data=2", "actor.layout.expert=2")
    model = with_experts(tmp_path / "model")
    by_disk, by_memory = (
        finished_run(tmp_path / transport, transport, f"model.path={model}", *layout)
        for transport in ("disk", "distributed")
    )
    assert by_disk == by_memory
    assert [line["weight_version"] for line in by_disk] == [1, 2]
    assert all(line["mismatch/mean_abs"] < 1e-6 and line["mismatch/max_abs"] < 1e-4 for line in by_disk)
    assert all(line["accuracy/mean"] > 0 and line["grad_norm"] > 0 for line in by_disk)


OF_UPDATES = {"loss", "grad_norm", "kl/old", "clip_high_prob"}


def test_replayed_experts_are_those_that_the_trainer_would_choose(tmp_path: Path) -> None:
    """In float32 engine and trainer route alike: up to the first optimizer step the run with replay is the run without,
    number for number. After it the routers would choose otherwise here and there, and replay keeps the servers'
    choice."""
    layout = ("actor.layout.tensor=1", "actor.layout.data=2", "actor.layout.expert=2", "actor.recompute=full")
    model = with_experts(tmp_path / "model")
    plain, replayed = (
        finished_run(tmp_path / value, "disk", f"model.path={model}", f"actor.routing_replay={value}", *layout)
        for value in ("false", "true")
    )
    changed = {name for name, value in plain[0].items() if replayed[0][name] != value}
    assert {"loss", "grad_norm"} <= changed <= OF_UPDATES
    for one, other in zip(plain, replayed, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-2)
        assert other["mismatch/mean_abs"] < 1e-6
        assert other["mismatch/max_abs"] < 1e-4
    assert "--enable-return-routed-experts" in (tmp_path / "true" / "logs" / "server0.log").read_text()
    assert "--enable-return-routed-experts" not in (tmp_path / "false" / "logs" / "server0.log").read_text()
