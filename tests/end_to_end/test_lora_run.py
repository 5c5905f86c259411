"""The whole loop with LoRA: adapters alone are trained and stored, servers write with the merged weights, and a kill
changes no bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dapo.storage.ledger import Event
from tests.end_to_end.test_kills import arguments, check_killed, live_through
from tests.end_to_end.test_quickstart import fates
from tests.processes import ROOT, Running

RANK, ALPHA = 4, 8.0
LORA = (f"actor.lora.rank={RANK}", f"actor.lora.alpha={ALPHA}", "actor.lora.modules=[q_proj,v_proj,down_proj]")
BASE = ROOT / "examples/quickstart/base/model.safetensors"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    finished = Running(*arguments(run_dir, *LORA), log=run_dir.parent / "out.txt").finish(300)
    assert finished.code == 0, finished.output
    return run_dir


def test_servers_write_with_base_and_adapters_merged(whole):
    steps = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [step["weight_version"] for step in steps] == [1, 2, 3]  # each with the trainer's checksums on every server
    assert max(step["mismatch/max_abs"] for step in steps) < 1e-3
    base, merged = load_file(BASE), load_file(whole / "model/model.safetensors")
    halves = load_file(whole / "model/adapter/adapter_model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    paths = {name.removesuffix(".weight") for name in changed}
    assert {f"base_model.model.{path}.lora_{half}.weight" for path in paths for half in "AB"} == set(halves)
    for path in paths:
        first, second = (halves[f"base_model.model.{path}.lora_{half}.weight"].double() for half in "AB")
        wanted = base[f"{path}.weight"].double() + ALPHA / RANK * second @ first
        torch.testing.assert_close(merged[f"{path}.weight"].double(), wanted, rtol=1e-6, atol=1e-7)


def test_a_checkpoint_is_smaller_than_the_weights_alone(whole):
    """Of every weight it would be four times as large: weights, master weights and both moments."""
    stored = sum(file.stat().st_size for file in (whole / "checkpoints/step_3/actor").iterdir())
    assert stored < BASE.stat().st_size / 2


def test_a_kill_changes_no_bit(whole, tmp_path):
    output = live_through(tmp_path / "run", "coordinator", Event.FINISHED, 11, *LORA)
    check_killed("coordinator", output)
    assert fates(tmp_path / "run") == fates(whole)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "run/model" / name).read_bytes() == (whole / "model" / name).read_bytes(), name


def test_its_checkpoint_converts_to_what_the_run_exports(whole, tmp_path):
    tool = [sys.executable, "-m", "tools.convert_checkpoint", "to-hf", whole / "checkpoints/step_3", tmp_path / "model"]
    subprocess.run([*tool, "--processes", "1"], cwd=ROOT, check=True)
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (whole / "model" / name).read_bytes(), name
