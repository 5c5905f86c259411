"""Metrics to Weights & Biases: refused before a run starts where they could not get there; complete in offline mode."""

import importlib.util
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError
from megatron_dapo.config.run_config import WandbConfig
from megatron_dapo.monitor.writer import ID_FILE, MetricsWriter, WandbMirror, check_wandb
from tests.processes import ROOT, Running

HAS_WANDB = importlib.util.find_spec("wandb") is not None
needs_wandb = pytest.mark.skipif(not HAS_WANDB, reason="the package wandb is not installed: pip install wandb")

READ = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2
content, at, pieces = open(sys.argv[1], "rb").read(), 7, []
found = {"id": set(), "history": [], "config": {}, "exit": []}
while at + 7 <= len(content):  # blocks of 32 KiB: checksum, length, kind (1 whole, 4 last piece), data
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    _, length, kind = struct.unpack_from("<IHB", content, at)
    pieces.append(content[at + 7 : at + 7 + length])
    at += 7 + length
    if kind not in (1, 4):
        continue
    record = wandb_internal_pb2.Record()
    record.ParseFromString(b"".join(pieces))
    pieces = []
    if record.HasField("run"):
        found["id"].add(record.run.run_id)
        for item in record.run.config.update:
            found["config"][item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    if record.HasField("history"):
        items = record.history.item
        found["history"].append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    if record.HasField("exit"):
        found["exit"].append(record.exit.exit_code)
found["id"] = sorted(found["id"])
print(json.dumps(found))
"""
"""Reads what an offline run keeps, as `wandb sync` does; in a process of its own, for wandb's state is global."""


def test_off_asks_for_nothing():
    check_wandb(WandbConfig())


@pytest.mark.skipif(HAS_WANDB, reason="wandb is installed here")
def test_a_missing_package_is_said_before_anything_starts(tmp_path):
    config = ROOT / "examples" / "quickstart" / "dapo.yaml"
    arguments = ("train", str(config), f"run.dir={tmp_path / 'run'}", "monitor.wandb.mode=offline")
    finished = Running(*arguments, log=tmp_path / "log.txt").finish(100)
    assert finished.code == ExitCode.CONFIG
    assert "the package wandb is not installed" in finished.output
    assert not (tmp_path / "run").exists()


def test_online_without_a_key_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="wandb login"):
        check_wandb(WandbConfig(mode="online"))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check_wandb(WandbConfig(mode="online"))


def test_every_line_reaches_the_mirror(tmp_path):
    class Mirror:
        def __init__(self):
            self.lines = []

        def write(self, values, histograms, samples):
            self.lines.append(dict(values))

    mirror = Mirror()
    writer = MetricsWriter(tmp_path, tensorboard=False, mirror=mirror)
    writer.write({"rollout_step": 1, "optimizer_step": 4, "loss": math.nan, "entropy": 0.5})
    writer.close()
    assert mirror.lines[0]["entropy"] == 0.5
    assert math.isnan(mirror.lines[0]["loss"])


def kept(run_dir) -> list[dict]:
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    read = [subprocess.run([sys.executable, "-c", READ, str(f)], capture_output=True, text=True) for f in files]
    assert all(each.returncode == 0 for each in read), read
    return [json.loads(each.stdout) for each in read]


@needs_wandb
def test_an_offline_run_keeps_metrics_config_and_how_it_ended(tmp_path):
    config = WandbConfig(mode="offline", name="mine")
    for steps in ((1, 2), (2, 3)):  # the second is the same run, resumed after step 1
        with WandbMirror(config, tmp_path, {"algorithm.clip.high": 0.28}, print) as mirror:
            for step in steps:
                values = {"rollout_step": step, "optimizer_step": 4 * step, "entropy": step / 10, "loss": None}
                mirror.write(values, {}, [])
                mirror.write({"rollout_step": step}, {"histograms/response_length": [1, 2, 2]}, [{"response": "abc"}])
    first, second = kept(tmp_path)
    assert first["id"] == second["id"] == [(tmp_path / ID_FILE).read_text().strip()]
    assert first["config"]["algorithm.clip.high"] == 0.28
    assert [line["entropy"] for line in first["history"]] == [0.1, 0.2]
    assert [line["rollout_step"] for line in second["history"]] == [2, 3]
    assert [line["_step"] for line in first["history"]] == [1, 2], "one row a rollout step"
    assert sum(first["history"][0]["histograms/response_length.values"]) == 3
    assert not {"loss", "responses.nrows"} & first["history"][0].keys(), "text is sent only where it is asked for"
    assert first["exit"] == [0]


@needs_wandb
def test_a_run_that_fails_is_marked_so(tmp_path):
    def fail():
        with WandbMirror(WandbConfig(mode="offline"), tmp_path, {}, print):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert kept(tmp_path)[0]["exit"] == [1]


@needs_wandb
def test_responses_are_sent_where_it_is_asked_for(tmp_path):
    with WandbMirror(WandbConfig(mode="offline", samples=True), tmp_path, {}, print) as mirror:
        mirror.write({"rollout_step": 1}, {}, [{"response": "abc", "accuracy": True}])
    (row,) = kept(tmp_path)[0]["history"]
    assert (row["responses.ncols"], row["responses.nrows"]) == (2, 1)


def test_a_service_that_dies_costs_the_run_nothing(tmp_path, monkeypatch):
    class Broken:
        def define_metric(self, *_, **__):
            pass

        def log(self, row, step):
            raise ConnectionResetError("Connection lost")

        def finish(self, exit_code):
            raise ConnectionResetError("Connection lost")

    options = {}
    module = SimpleNamespace(
        init=lambda **_: Broken(),
        Settings=lambda **given: options.update(given),
        errors=SimpleNamespace(Error=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    told = []
    with WandbMirror(WandbConfig(mode="online"), tmp_path, {}, told.append) as mirror:
        writer = MetricsWriter(tmp_path, tensorboard=False, mirror=mirror)
        writer.write({"rollout_step": 3, "optimizer_step": 4, "entropy": 0.5})
        writer.close()
    assert told == ["monitor.wandb: step 3 is not shown (ConnectionResetError: Connection lost)"]
    assert options["finish_timeout"] == 60, "an end that waits for the network for ever is killed by Slurm"
