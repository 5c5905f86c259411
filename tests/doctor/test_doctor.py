"""The command on the quickstart, healthy and with a fault planted in what its config names."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import load_config
from megatron_dapo.doctor.config_checks import (
    bytes_on_disk,
    check_data,
    check_host_memory,
    check_model,
    check_tokenizer,
)
from megatron_dapo.doctor.examine import examine
from megatron_dapo.doctor.probing import Node, Status
from megatron_dapo.plan.model_dimensions import BUILT_IN
from megatron_dapo.plan.scenario import changed
from tests.plan.conftest import RECIPES
from tests.test_repository import imports, python_files, within

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart" / "dapo.yaml"


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def config(tmp_path):
    """The quickstart with a copy of its model that a test may spoil."""
    shutil.copytree(ROOT / "examples" / "quickstart" / "base", tmp_path / "base")
    return changed(load_config(QUICKSTART), {"model.path": str(tmp_path / "base"), "run.dir": str(tmp_path / "run")})


def doctor(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_the_quickstart_passes(tmp_path):
    answer = doctor(str(QUICKSTART), f"run.dir={tmp_path / 'run'}")
    assert answer.exit_code == 0, answer.stdout
    assert " 0 fail" in answer.stdout
    for check in (
        "versions",
        "collectives",
        "ports",
        "disk space",
        "disk speed",
        "clock",
        "model",
        "tokenizer",
        "data",
    ):
        assert f"{check}: " in answer.stdout
    assert not (tmp_path / "run").exists(), "it leaves nothing behind"


def test_the_machine_alone_passes():
    assert doctor().exit_code == 0


def test_nothing_that_trains_imports_these_checks():
    files = [f for f in python_files("megatron_dapo") if f.parent.name != "doctor" and f.name != "doctor.py"]
    assert len(files) > 100
    assert not [file for file in files for module in imports(file) if within(module, {"megatron_dapo.doctor"})]


GPU_CHECKS = ("imports", "SGLang's pins", "compilers", "environment", "host name", "locked memory", "driver")


def test_a_laptop_hears_nothing_of_gpu_nodes(tmp_path):
    """An empty PATH: no nvidia-smi."""
    answer = examine(load_config(QUICKSTART), Node(environment={"PATH": str(tmp_path)}))
    assert not {finding.check for finding in answer} & set(GPU_CHECKS)


def test_a_gpu_node_is_looked_at_as_one(machine):
    findings = list(examine(None, machine.node))
    assert {finding.check for finding in findings} >= set(GPU_CHECKS)
    found = {finding.check: finding for finding in findings}
    assert found["GPUs"].found == "8 x NVIDIA H100 80GB HBM3, 81559 MiB, driver 580.65.06"
    assert found["collectives"].found == "NCCL 2.28.9"
    assert [f for f in findings if f.check in GPU_CHECKS and f.status is not Status.PASS] == []


def test_the_command_asks_the_nvidia_smi_on_the_path(machine, monkeypatch):
    """One whose GPUs nobody may use, on this Python: it has no kernels, and says so."""
    machine.gpus("NVIDIA H100 80GB HBM3, 81559, 4, 580.65.06, Prohibited, Disabled, 0")
    monkeypatch.setenv("PATH", str(machine.programs))
    monkeypatch.setenv("PYTHONPATH", str(machine.site), prepend=os.pathsep)
    answer = doctor()
    assert answer.exit_code == 1
    assert "fail    GPUs: compute mode of 0, 1, 2, 3, 4, 5, 6, 7 is Prohibited" in answer.stdout
    assert "fix: nvidia-smi -c 0 (as root)" in answer.stdout
    assert "pass    imports: " in answer.stdout


def test_a_fault_is_a_line_with_its_mend_and_an_exit_code(tmp_path):
    answer = doctor(str(QUICKSTART), f"run.dir={tmp_path / 'run'}", "model.path=nowhere")
    assert answer.exit_code == 1
    assert "fail    model: nowhere/config.json is not there\n        fix: set model.path" in answer.stdout


def test_a_config_that_is_none_is_a_fault(tmp_path):
    answer = doctor(str(QUICKSTART), "algorithm.group_sise=8")
    assert answer.exit_code == 1
    assert "algorithm.group_size" in answer.stdout


def test_a_dry_run_needs_a_config():
    assert doctor("--dry-run").exit_code == 2


def test_a_healthy_model_passes(config):
    hf, finding = check_model(config)
    assert finding.status is Status.PASS
    assert hf is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor.layout.tensor": 3}, "actor.layout.tensor = 3"),
        ({"model.context_length": 10**6}, "model.context_length"),
    ],
)
def test_a_layout_or_length_that_the_model_does_not_know_fails(changes, said, config):
    _, finding = check_model(changed(config, changes))
    assert finding.status is Status.FAIL
    assert said in finding.found


def test_a_missing_weight_file_is_named(config):
    folder = Path(config.model.path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _, finding = check_model(config)
    assert finding.status is Status.FAIL
    assert "model-00002-of-00002.safetensors" in finding.found


def test_a_tokenizer_says_where_a_response_ends(config):
    finding = check_tokenizer(config)
    assert finding.status is Status.PASS
    assert "'</s>'" in finding.found


def test_one_without_an_end_token_fails(config):
    folder = Path(config.model.path)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            fields = json.loads((folder / name).read_text())
            fields.pop("eos_token", None)
            fields.pop("eos_token_id", None)
            (folder / name).write_text(json.dumps(fields))
    finding = check_tokenizer(config)
    assert finding.status is Status.FAIL
    assert "end token" in finding.found


def test_a_broken_row_fails_with_file_and_line(config, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "no answer"}\n')
    finding = check_data(changed(config, {"data.path": str(rows)}))
    assert finding.status is Status.FAIL
    assert "rows.jsonl" in finding.found
    assert "2" in finding.found


def test_data_passes_with_its_counts(config):
    finding = check_data(config)
    assert finding.status is Status.PASS
    assert "4000 used" in finding.found


def test_disk_and_memory_are_those_of_the_model():
    config, hf = load_config(RECIPES / "h100_32.yaml"), BUILT_IN["Qwen2.5-32B"]
    needed, weights = bytes_on_disk(config, hf)
    assert weights == pytest.approx(65.5e9, rel=0.001)
    assert needed == pytest.approx(3 * weights + 3 * 32.76e9 * 14, rel=0.001), "two checkpoints and one being written"
    assert check_host_memory(config, hf, 500e9, processes=8, on_gpu=True).status is Status.PASS
    assert check_host_memory(config, hf, 20e9, processes=8, on_gpu=True).status is Status.WARNING


def test_memory_counts_a_checkpoint_of_the_ranks_that_write_it():
    """Eight ranks of 4.1e9 parameters each: 53 GB a rank with the optimizer's state on the host, and 14 bytes a
    parameter more for a checkpoint."""
    config, hf = load_config(RECIPES / "h100_16.yaml"), BUILT_IN["Qwen2.5-32B"]
    finding = check_host_memory(config, hf, 512e9, processes=8, on_gpu=True)
    assert finding.status is Status.WARNING
    assert "about 902.4 GB" in finding.found, "8 x (53.2 + 57.3), 10.3 of the coordinator, 8.1 of an export"
    assert check_host_memory(config, hf, 950e9, processes=8, on_gpu=True).status is Status.PASS


@pytest.mark.slow
def test_a_dry_run_makes_a_step_and_leaves_nothing(tmp_path):
    answer = doctor(str(QUICKSTART), f"run.dir={tmp_path / 'run'}", "--dry-run")
    assert answer.exit_code == 0, answer.stdout
    assert "pass    dry run" in answer.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_that_fails_says_why(tmp_path):
    arguments = [f"run.dir={tmp_path / 'run'}", "rollout.extra_args=[--no-such-flag]", "--dry-run"]
    answer = doctor(str(QUICKSTART), *arguments)
    assert answer.exit_code == 1
    assert "no-such-flag" in answer.stdout
    assert list(tmp_path.iterdir()) == []
