"""`hf://` paths against a hub on this machine: fetched once, then found in the cache; and what is said without one."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.data.hub import local_path, pinned, snapshot_of, with_local_paths
from megatron_dapo.data.records import DataError, check_file, raw_rows
from megatron_dapo.data.tokenizer import load_text_tools

COMMIT = "a" * 40
REPOSITORIES = {
    "models/owner/small": {"config.json": b"{}", "model.safetensors": b"weights", "original/other.pth": b"not wanted"},
    "datasets/owner/sums": {"main/train-0.jsonl": b'{"n": 0}\n', "main/train-1.jsonl": b'{"n": 1}\n'},
}


class Hub(BaseHTTPRequestHandler):
    """The calls of the hub's interface that a download makes."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0].removeprefix("/")
        for name, files in REPOSITORIES.items():
            plain = name.removeprefix("models/")
            if path.startswith(f"api/{name}/tree/"):
                tree = [
                    {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for file, content in files.items()
                ]
                return self.answer(json.dumps(tree).encode())
            if path.startswith(f"api/{name}"):
                about = {"id": plain, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
                return self.answer(json.dumps(about).encode())
            if path.startswith(f"{plain}/resolve/{COMMIT}/"):
                return self.answer(files[path.removeprefix(f"{plain}/resolve/{COMMIT}/")])
        return self.answer(b'{"error": "Repository not found"}', 404)

    def answer(self, content, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as `train` sets it for the run
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def test_models_and_datasets_come_from_the_hub_and_then_from_the_cache(hub, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "run: {dir: r, rollout_steps: 1}\nmodel: {path: 'hf://owner/small', context_length: 9000}\n"
        "data: {path: 'hf://datasets/owner/sums/main/train-*.jsonl'}\nevaluation: {path: held.jsonl}\n"
        "rollout: {max_new_tokens: 5000}\n"
    )
    config = with_local_paths(load_config(file))
    model = Path(config.model.path)
    assert model.name == COMMIT, "a resume with other weights is refused by the path"
    assert sorted(each.name for each in model.iterdir()) == ["config.json", "model.safetensors"]
    assert config.evaluation.path == "held.jsonl"
    rows = [row for _, row in raw_rows(Path(config.data.path), "data.path")]
    assert rows == [b'{"n": 0}\n', b'{"n": 1}\n']
    hub.shutdown()
    hub.server_close()
    assert local_path("hf://owner/small", "model.path") == config.model.path


def test_what_the_hub_does_not_have_is_said_with_the_command_that_fetches_by_hand(hub):
    with pytest.raises(ConfigError) as error:
        local_path("hf://owner/none", "model.path")
    assert (
        "`hf download owner/none --repo-type model --local-dir models/none` elsewhere, copy that folder and set "
        "model.path=models/none" in str(error.value)
    )


def test_a_resumed_run_keeps_its_commits_though_the_hub_and_the_cache_move(tmp_path):
    stored = tmp_path / "config.yaml"
    stored.write_text(
        "path: /old/hub/models--owner--small/snapshots/c0ffee\npath: /x/datasets--owner--sums/snapshots/d1/f\n"
    )
    assert pinned("hf://owner/small", stored.read_text()) == "hf://owner/small@c0ffee"
    assert pinned("hf://datasets/owner/sums/f.csv", stored.read_text()) == "hf://datasets/owner/sums@d1/f.csv"
    for other in ("hf://owner/smaller", "hf://owner/small@main", "models/small"):
        assert pinned(other, stored.read_text()) == other
    old, new = (f"/{cache}/hub/models--owner--small/snapshots/c0ffee" for cache in ("a", "b"))
    assert snapshot_of(old) == snapshot_of(new) != snapshot_of(new.replace("c0ffee", "d1"))


@pytest.mark.parametrize("path", ["hf://small", "hf://owner/small/config.json", "hf://datasets/sums"])
def test_another_form_is_refused(path):
    with pytest.raises(ConfigError, match="write hf://OWNER/NAME"):
        local_path(path, "model.path")


def test_a_bare_name_is_answered_with_the_form_of_an_address(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="or hf://OWNER/NAME of the Hugging Face hub"):
        HFModelConfig.load(Path("Qwen/Qwen2.5-0.5B"))
    with pytest.raises(ConfigError, match="or hf://OWNER/NAME of the Hugging Face hub"):
        load_text_tools("Qwen/Qwen2.5-0.5B")
    with pytest.raises(DataError, match=r"set data\.path to .* or hf://datasets/OWNER/NAME/FILE"):
        check_file(Path("openai/gsm8k"), "data.path")
