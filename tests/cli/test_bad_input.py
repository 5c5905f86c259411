"""Each fault of a user: one clear error, in time, a non-zero exit, no process left."""

import json
import shutil
import socket
from pathlib import Path

import pytest

from megatron_dapo.cli import train
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.storage.durable import lock_folder
from tests.processes import ROOT, Running

CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"
BASE = ROOT / "examples" / "quickstart" / "base"


@pytest.fixture
def run(tmp_path):
    def start(*overrides: str, config: Path = CONFIG, timeout_s: float = 120):
        arguments = ["train", str(config), f"run.dir={tmp_path / 'run'}", *overrides]
        return Running(*arguments, log=tmp_path / "out.txt").finish(timeout_s)

    return start


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """In this process: for what is refused before the run starts any other. Its words, each as in a terminal."""

    def start(*overrides: str, run_dir: Path = tmp_path / "run") -> str:
        monkeypatch.chdir(ROOT)
        code = train.train_command(CONFIG, [f"run.dir={run_dir}", *overrides])
        said = "".join(capfd.readouterr())
        assert code == ExitCode.CONFIG, said
        assert "Traceback" not in said
        assert "starting trainer" not in said
        return said

    return start


def expect(finished, code, *parts, within_s=60):
    assert finished.code == code, finished.output
    for part in parts:
        assert part in finished.output, finished.output
    assert "Traceback" not in finished.output
    assert finished.left_behind == ()
    assert finished.seconds < within_s


def said(output: str, *parts: str) -> None:
    for part in parts:
        assert part in output, output


@pytest.mark.parametrize("how", ["in another format", "cut"])
def test_a_model_without_whole_weights(refused, tmp_path, how):
    model = shutil.copytree(BASE, tmp_path / "model")
    weights = model / "model.safetensors"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        weights.rename(model / "pytorch_model.bin")
    said(refused(f"model.path={model}"), f"{weights}: ", "fetch it again, as safetensors")


def test_a_missing_prompt_file(refused):
    said(refused("data.path=nowhere.jsonl"), "nowhere.jsonl", "no such prompt file", "relative paths begin at")


def test_an_empty_prompt_file(refused, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    said(refused(f"data.path={empty}"), "empty.jsonl", "no usable prompt")


def test_a_prompt_that_is_longer_than_allowed(refused, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "Tom has 3 pens . " * 200, "answer": "3"}))
    said(refused(f"data.path={file}"), "long.jsonl:1", "data.max_prompt_tokens")


def test_a_context_too_short_for_prompt_and_response(refused):
    said(refused("model.context_length=70"), "model.context_length = 70", "raise it or lower")


def test_a_tokenizer_without_an_end_token(refused, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(BASE, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("eos_token", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = json.loads((folder / "config.json").read_text())
    del model["eos_token_id"]  # at which SGLang would end a response too
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    said(refused(f"model.path={folder}"), str(folder), "end token")


def test_a_verifier_that_cannot_be_imported(refused):
    said(refused("reward.verifier=nomod:fn"), "reward.verifier = nomod:fn", "No module named 'nomod'")


def test_an_unknown_key(run):
    expect(run("actor.layout.tensr=2"), ExitCode.CONFIG, "did you mean actor.layout.tensor?", within_s=30)


def test_a_model_folder_that_is_none(refused, tmp_path):
    said(refused(f"model.path={tmp_path}"), "config.json")


def test_a_layout_that_the_model_cannot_be_split_by(refused):
    said(refused("actor.layout.tensor=3"), "actor.layout.tensor", "3")


@pytest.mark.slow
def test_a_port_in_use(run):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        expect(run(f"rollout.port={port}"), ExitCode.FLEET, "rollout.port", str(port))


@pytest.mark.slow
def test_a_server_that_dies_at_start(run):
    expect(run("rollout.extra_args=[--no-such-option]", timeout_s=180), ExitCode.FLEET, "no-such-option", within_s=180)


def test_a_run_directory_that_holds_a_run(refused, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.jsonl").write_text('{"event": "dispatched"}\n')
    said(refused(), "holds a run already", "run.resume=true")


def test_a_run_directory_that_a_live_run_holds(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.jsonl").write_text('{"event": "dispatched"}\n')
    with lock_folder(tmp_path / "run"):
        expect(run(), ExitCode.CONFIG, "another process writes there", "megatron-dapo status", within_s=30)


def test_a_run_directory_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").touch()
    said(refused(run_dir=tmp_path / "file" / "run"), "run.dir", "choose a directory")


def test_a_server_address_without_its_scheme(refused):
    said(refused("rollout.urls=[10.0.0.1:30000]"), "rollout.urls")


def test_a_step_to_resume_from_without_a_resume(refused):
    said(refused("run.resume_step=2"), "run.resume=true")


def test_a_model_config_that_is_no_json(refused, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(BASE, folder)
    (folder / "config.json").write_text('{"vocab_size": 64')
    said(refused(f"model.path={folder}"), "config.json", "no JSON")


def test_a_ray_cluster_that_is_not_there(run, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    expect(run(), ExitCode.TRAINER, "RAY_ADDRESS = 127.0.0.1:1", "no Ray answers at 127.0.0.1:1")
