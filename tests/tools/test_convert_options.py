"""What the conversion's command refuses before it starts, and what it says where a worker fails."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.actor.gloo import ForkedRanks
from tests.actor.tiny import save_tiny
from tools.convert_checkpoint import main
from tools.rank_pool import RankError


@pytest.fixture
def model(tmp_path) -> Path:
    return save_tiny(tmp_path / "models" / "source", "qwen2", tied=False)


@pytest.fixture
def refused(capfd):
    """`refused(ARGUMENTS)`: what the command says; it ends with 2 before it starts anything."""

    def refused(*arguments: object) -> str:
        assert main([*map(str, arguments), "--processes", "1"]) == 2
        return capfd.readouterr().err

    return refused


def test_what_overwrite_would_delete_beside_the_target_is_kept(refused, model, tmp_path):
    """The folder that is replaced is deleted, with all that is in it."""
    source, before = model, {file.name: file.read_bytes() for file in model.iterdir()}
    assert "lie in one another" in refused("to-megatron", source, tmp_path / "models", "--overwrite")
    assert "lie in one another" in refused("to-megatron", source, source / "megatron")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "models")
    assert "lie in one another" in refused("to-megatron", source, link, "--overwrite")
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.tex").write_text("years of work")
    assert "no folder that to-megatron wrote" in refused("to-megatron", source, foreign, "--overwrite")
    assert "no folder that to-megatron wrote" in refused("to-megatron", foreign, source, "--overwrite")
    assert "no folder that to-hf wrote" in refused("to-hf", source, foreign / "chapter.tex", "--overwrite")
    assert (foreign / "chapter.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "rank 1 raised:\nTraceback\n  x\nOSError: [Errno 28] No space left on device\n",
            "[Errno 28] No space left on device",
        ),
        ("rank 1 raised:\nTraceback\n  x\na.b.WeightsError: t ends: cut\n", "t ends: cut"),
        ("rank 1 raised:\nTraceback\n  x\nTypeError: odd\n", "rank 1 raised:\nTraceback\n  x\nTypeError: odd\n"),
    ],
    ids=["disk", "weights", "fault"],
)
def test_a_worker_that_fails_is_told_without_its_traceback(model, tmp_path, monkeypatch, capsys, text, reason):
    def fail(*_):
        raise RankError(text)

    monkeypatch.setattr("tools.conversion.workers.start_workers", fail)
    assert main(["to-megatron", str(model), str(tmp_path / "megatron")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'megatron'} was not written: {reason}\n"


@pytest.mark.parametrize("option", [("to-megatron", "--pipeline"), ("to-hf", "--tensor"), ("to-hf", "--pipeline")])
def test_an_option_that_nothing_would_read_is_refused(refused, model, tmp_path, option):
    command, name = option
    assert f"{name} 2: is the layout that --verify loads" in refused(command, model, tmp_path / "x", name, 2)


@pytest.fixture
def cached(model, monkeypatch) -> str:
    """The address of a model that Hugging Face's cache has; nothing answers for the hub."""
    cache = model.parent / "cache" / "hub" / "models--owner--small"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("a" * 40)
    shutil.copytree(model, cache / "snapshots" / ("a" * 40))
    for name in ("HF_HUB_CACHE", "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(model.parent / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return "hf://owner/small"


def test_a_model_of_the_hub_is_converted_by_its_address(cached, refused, model, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.convert_checkpoint.RankPool", ForkedRanks)
    there, back = tmp_path / "megatron", tmp_path / "back"
    assert main(["to-megatron", cached, str(there), "--processes", "1"]) == 0
    step = tmp_path / "run" / "checkpoints" / "step_1"
    shutil.copytree(there, step / "actor", ignore=shutil.ignore_patterns("hf"))
    manifest = json.loads((there / "manifest.json").read_text())
    manifest["files"] = {name: digest for name, digest in manifest["files"].items() if not name.startswith("hf/")}
    (step / "actor" / "manifest.json").write_text(json.dumps(manifest))
    assert main(["to-hf", str(step), str(back), "--processes", "1", "--base", cached]) == 0
    (tmp_path / "run" / "config.yaml").write_text(f"model: {{path: '{cached}'}}\n")
    assert main(["to-hf", str(step), str(back), "--processes", "1", "--overwrite"]) == 0
    before, after = load_file(model / "model.safetensors"), load_file(back / "model.safetensors")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert "MODEL = hf://owner: write hf://OWNER/NAME" in refused("to-megatron", "hf://owner", tmp_path / "x")


@pytest.mark.parametrize("verify", [(), ("--verify",)])
@pytest.mark.parametrize("name", ["", "model", "checkpoints"])
def test_what_is_no_checkpoint_is_told_from_a_damaged_one(refused, model, tmp_path, monkeypatch, name, verify):
    monkeypatch.setattr("tools.conversion.workers.start_workers", lambda *_: None)
    run = tmp_path / "run"
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    shutil.copytree(model, run / "model")
    (run / "manifest.json").write_text("{}")
    told = refused("to-hf", run / name, tmp_path / "out", "--base", model, *verify)
    assert f"{run / name}: no checkpoint; name RUN/checkpoints/step_N, or a folder that to-megatron wrote" in told


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_an_impossible_size_of_files_is_refused(model, tmp_path, size):
    with pytest.raises(SystemExit, match="2"):
        main(["to-hf", str(model), str(tmp_path / "back"), "--max-file-gb", size])


def test_the_end_of_a_batch_job_is_an_interrupt(model, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("tools.conversion.workers.start_workers", lambda *_: None)
    monkeypatch.setattr("tools.convert_checkpoint.convert", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        assert main(["to-megatron", str(model), str(tmp_path / "x")]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_says_whether_the_target_was_written(model, tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.conversion.workers.start_workers", lambda *_: None)
    monkeypatch.setattr("tools.convert_checkpoint.convert", stop)
    assert main(["to-megatron", str(model), str(tmp_path / "x"), "--verify"]) == 130
    monkeypatch.setattr("tools.convert_checkpoint.convert", lambda *_: None)
    monkeypatch.setattr("tools.convert_checkpoint.verify", stop)
    assert main(["to-megatron", str(model), str(tmp_path / "x"), "--verify"]) == 130
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert first == f"interrupted: {tmp_path / 'x'} was not written"
    assert second == f"interrupted: {tmp_path / 'x'} was written, but not verified"
