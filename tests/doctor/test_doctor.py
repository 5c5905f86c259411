"""The command on the quickstart, healthy and with a fault planted in what its config names, and in this machine."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import load_config
from megatron_dapo.doctor import config_checks, machine_checks
from megatron_dapo.doctor.config_checks import examine, findings_of
from megatron_dapo.doctor.probing import Facts, Gpu
from megatron_dapo.plan.scenario import changed
from tests.plan.conftest import RECIPES
from tests.test_repository import imports, python_files, within

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart" / "dapo.yaml"
PASS, WARNING, FAIL = "pass", "warning", "fail"


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def config(tmp_path):
    """The quickstart with a copy of its model that a test may spoil."""
    shutil.copytree(ROOT / "examples" / "quickstart" / "base", tmp_path / "base")
    return changed(load_config(QUICKSTART), {"model.path": str(tmp_path / "base"), "run.dir": str(tmp_path / "run")})


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken


def doctor(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def of(check, config, changes=None):
    """(status, found) of a check's findings."""
    facts = Facts(changed(config, changes or {}))
    return [(finding.status, finding.found) for finding in findings_of(check(facts))]


def test_the_quickstart_passes(tmp_path):
    answer = doctor(str(QUICKSTART), f"run.dir={tmp_path / 'run'}")
    assert answer.exit_code == 0, answer.stdout
    assert " 0 fail" in answer.stdout
    for check in ("versions", "ports", "limits", "disk", "model", "inputs"):
        assert f"{check}: " in answer.stdout
    assert not (tmp_path / "run").exists(), "it leaves nothing behind"


def test_the_machine_alone_passes():
    assert doctor().exit_code == 0


def test_nothing_that_trains_imports_these_checks():
    files = [f for f in python_files("megatron_dapo") if f.parent.name != "doctor" and f.name != "doctor.py"]
    assert len(files) > 100
    assert not [file for file in files for module in imports(file) if within(module, {"megatron_dapo.doctor"})]


def test_a_laptop_hears_nothing_of_gpu_nodes(tmp_path, monkeypatch):
    """An empty PATH: no nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))
    heard = {name for name, _ in examine(Facts(load_config(QUICKSTART)))}
    assert heard == {"versions", "gpus", "limits", "ports", "run dir", "model", "disk", "inputs"}


def test_the_command_asks_the_nvidia_smi_on_the_path(machine):
    """One that fails."""
    machine.program("nvidia-smi", "#!/bin/sh\nexit 9\n")
    answer = doctor()
    assert answer.exit_code == 1
    assert "fail    gpus: nvidia-smi is here but lists no GPU (exit code 9): no output\n        fix: " in answer.stdout


def test_a_fault_is_a_line_with_its_fix_told_once(tmp_path):
    answer = doctor(str(QUICKSTART), f"run.dir={tmp_path / 'run'}", "model.path=nowhere")
    assert answer.exit_code == 1
    assert answer.stdout.count("nowhere/config.json: No such file") == 1
    assert "as the message says" not in answer.stdout


def test_a_config_that_is_none_is_a_fault():
    answer = doctor(str(QUICKSTART), "algorithm.group_sise=8")
    assert answer.exit_code == 1
    assert "algorithm.group_size" in answer.stdout


def test_a_dry_run_that_needs_other_nodes_is_not_made(monkeypatch, tmp_path):
    """As on a login node: the guide's command. Its model and data are not here, which fails."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(config_checks, "dry_run", lambda *_: pytest.fail("it cannot run here"))
    shown = doctor(str(RECIPES / "h100_32.yaml"), f"run.dir={tmp_path}/run", "--dry-run").stdout
    assert "warning dry run: not made: it needs 32 GPUs of other nodes" in shown
    assert "warning gpus: none" in shown


def test_a_dry_run_needs_a_config():
    assert doctor("--dry-run").exit_code == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor.layout.tensor": 3}, "actor.layout.tensor = 3"),
        ({"model.context_length": 10**6}, "model.context_length"),
    ],
)
def test_a_layout_or_length_that_the_model_does_not_know_fails(changes, said, config):
    [(status, found)] = of(config_checks.check_inputs, config, changes)
    assert status is FAIL
    assert said in found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm.policy_loss": "no_such_module:Loss"}, "import of no_such_module failed"),
        ({"algorithm.advantage.estimator": "math:nothing"}, "no function or class nothing"),
        ({"data.order": "math:nothing"}, "no function or class nothing"),
    ],
)
def test_own_code_that_cannot_be_used_fails(changes, said, config):
    [(status, found)] = of(config_checks.check_inputs, config, changes)
    assert status is FAIL
    assert said in found


def test_what_is_seldom_meant_is_a_warning(config, tmp_path):
    """A clip in per cent, a warm-up longer than the run, prompts that come twice in a step, held-out problems that are
    trained on, prose as answer."""
    row = {"prompt": "1 + 1?", "answer": "What is one and one, so asks Tom of Ann?"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    mine = str(tmp_path / "p.jsonl")
    changes = {"data.path": mine, "evaluation.path": mine, "algorithm.clip.high": 28.0, "run.rollout_steps": 3}
    changes["actor.optimizer.warmup_rollout_steps"] = 20
    found = of(config_checks.check_inputs, config, changes)
    assert {status for status, _ in found} == {WARNING}
    clip, warm_up, repeated, heldout, prose = (said for _, said in found)
    assert clip.startswith("algorithm.clip.high = 28: ratios up to 29 are not clipped")
    assert warm_up.startswith("actor.optimizer.warmup_rollout_steps = 20: more than the run has")
    assert "more prompts than there are (1)" in repeated
    assert heldout.startswith("1 of 1 held-out problems are trained on too")
    assert "source p: every ground truth is prose, as 'What is one" in prose


def test_a_missing_weight_file_is_named(config):
    folder = Path(config.model.path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    [(status, found)] = of(config_checks.check_model, config)
    assert status is FAIL
    assert "model-00002-of-00002.safetensors" in found


@pytest.mark.parametrize("index", ["{", "{}", "[]", '{"weight_map": null}'])
def test_a_damaged_index_of_the_weights_is_named(index, config):
    (Path(config.model.path) / "model.safetensors.index.json").write_text(index)
    [(status, found)] = of(config_checks.check_model, config)
    assert status is FAIL
    assert "model.safetensors.index.json is damaged" in found


def test_a_weight_file_that_is_cut_is_named(config):
    file = Path(config.model.path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    [(status, found)] = of(config_checks.check_model, config)
    assert status is FAIL
    assert "fetch it again" in found


def test_weights_of_another_model_are_named(config):
    file = Path(config.model.path) / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"num_hidden_layers": fields["num_hidden_layers"] + 1}))
    [(status, found)] = of(config_checks.check_model, config)
    assert status is FAIL
    assert "is missing; it must have shape" in found


def test_tokenizer_and_data_pass_with_end_tokens_and_counts(config):
    (status, tokenizer), (_, data) = of(config_checks.check_inputs, config)
    assert status is PASS
    assert "'</s>'" in tokenizer
    assert "4000 used" in data


def test_a_tokenizer_without_an_end_token_fails(config):
    folder = Path(config.model.path)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            fields = json.loads((folder / name).read_text())
            fields.pop("eos_token", None)
            fields.pop("eos_token_id", None)
            (folder / name).write_text(json.dumps(fields))
    [(status, found)] = of(config_checks.check_inputs, config)
    assert status is FAIL
    assert "end token" in found


def test_a_broken_row_fails_with_file_and_line(config, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "no answer"}\n')
    [(status, found)] = of(config_checks.check_inputs, config, {"data.path": str(rows)})
    assert status is FAIL
    assert "rows.jsonl" in found
    assert "2" in found


def test_a_run_directory_is_free_or_goes_on_or_is_taken(config):
    folder = Path(config.run.dir)
    (folder / "logs").mkdir(parents=True)
    (folder / "ledger.jsonl").touch()
    check = config_checks.check_run_dir
    assert of(check, config)[0][0] is PASS, "a start that failed leaves these"
    (folder / "ledger.jsonl").write_text("{}\n")
    assert of(check, config)[0][0] is WARNING
    assert of(check, config, {"run.resume": True})[0][0] is PASS
    (folder / "ledger.jsonl").unlink()
    (folder / "model").mkdir()
    assert of(check, config)[0][0] is FAIL, "files of another kind"


def test_a_disk_with_room_passes_and_keeps_nothing(config, tmp_path, monkeypatch):
    before = sorted(tmp_path.iterdir())
    room, way = of(config_checks.check_disk, config)
    assert (room[0], way[1]) == (PASS, "new weights reach the servers by: disk")
    [_, way] = of(config_checks.check_disk, config, {"actor.device": "cuda"})
    assert way[1] == "new weights reach the servers by: distributed"
    for gpus, alone in ((1, "disk"), (2, "distributed")):
        monkeypatch.setattr(Facts, "gpus", [Gpu("H100", 81559, 0, "580")] * gpus)
        [_, way] = of(config_checks.check_disk, config, {"actor.layout.data": 1, "rollout.servers": 1})
        assert way[1] == f"new weights reach the servers by: {alone}", "trainer and server share a GPU that is alone"
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_is_full_or_not_to_be_written_is_told(config, monkeypatch):
    def refused(**where):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("tempfile.NamedTemporaryFile", refused)
        assert "No space left on device" in of(config_checks.check_disk, config)[0][1]
    monkeypatch.setattr(config_checks, "disk_bytes", lambda case: 1e18)
    assert of(config_checks.check_disk, config)[0][0] is FAIL


def test_ports_are_free_or_taken_and_servers_of_someone_else_answer(config, listener):
    check, port = machine_checks.check_ports, listener.getsockname()[1]
    assert of(check, config)[0][0] is PASS
    [(status, found)] = of(check, config, {"rollout.port": port, "rollout.servers": 1})
    assert status is FAIL
    assert str(port) in found
    here, away = f"http://127.0.0.1:{port}", "http://127.0.0.1:1"
    assert of(check, config, {"rollout.urls": (here,)})[0][0] is PASS
    [(status, found)] = of(check, config, {"rollout.urls": (here, away)})
    assert status is FAIL
    assert away in found


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
