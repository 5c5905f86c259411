"""Constants from a made-up run: each gives, put into the planner's own formula, what the run measured."""

import json

import numpy as np
import pytest
import yaml

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import load_config
from megatron_dapo.monitor.timeline import SpanFile
from megatron_dapo.plan.scenario import Scenario, changed, load_calibration
from megatron_dapo.plan.sync import sync_seconds
from megatron_dapo.plan.trainer_time import forward_flops
from tests.plan.conftest import RECIPES
from tests.tools.test_profile_throughput import EXPERTS, MODEL, write_run
from tests.tools.timelines import ZERO, write_timeline
from tools import calibrate as calibrate_module
from tools.profile_throughput import main

HF = HFModelConfig.of(MODEL, shown="test")
LINE = {"length": 120.0, "responses": 6000 / 120.0}
"""What every line of the made-up run says: trained tokens over accepted length."""


def calibrate(tmp_path, *arguments, run=None, **layout):
    run = run or write_run(tmp_path / "run")
    write_timeline(run, 2, **layout)
    out = tmp_path / "mine.yaml"
    assert main([str(run), "--calibration", str(out), *arguments, "--out", str(tmp_path / "report")]) == 0
    return yaml.safe_load(out.read_text()), load_calibration(out)


def test_the_planner_reads_the_file_and_what_was_not_measured_keeps_its_source(tmp_path):
    entries, constants = calibrate(tmp_path)
    package = load_calibration()
    assert constants.network_bandwidth == package.network_bandwidth
    assert entries["network_bandwidth"]["source"] == "one 400 Gb/s adapter a GPU"
    assert entries["train_efficiency"]["source"].startswith("measured: ")
    assert "run, rollout step 2" in entries["train_efficiency"]["source"]


def test_efficiency_is_flops_over_the_seconds_of_the_passes(tmp_path):
    entries, _ = calibrate(tmp_path, "--peak-flops", "1e7")
    flops = forward_flops(HF, np.array([LINE["length"] + 5])).item() * LINE["responses"]
    assert entries["train_efficiency"]["value"] == pytest.approx(min(1, 3 * flops / (24 * 1e7)), rel=1e-5)
    assert entries["forward_efficiency"]["value"] == pytest.approx(min(1, flops / (6 * 1e7)), rel=1e-5)
    assert entries["peak_flops"] == {
        "value": 1e7,
        "unit": "FLOP/s of a GPU in bfloat16",
        "source": "given on the command line",
    }


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_planner_gives_the_passes_that_were_measured_with_experts(tmp_path, recompute):
    """Its own formula, put together here, with the efficiency that was found, takes the seconds that were measured."""
    run = write_run(tmp_path / "run", model=EXPERTS)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"actor": {"recompute": recompute}}))
    entries, constants = calibrate(tmp_path, "--peak-flops", "1e9", run=run)
    hf = HFModelConfig.of(EXPERTS, shown="test")
    tokens = (LINE["length"] + 5) * LINE["responses"]
    forward = forward_flops(hf, np.array([LINE["length"] + 5])).item() * LINE["responses"]
    own = 2 * 2 * 2 * 3 * 64 * 32 * tokens
    forward += own * (1 / constants.expert_efficiency - 1)
    again = 0 if recompute == "none" else forward - 2 * hf.vocab_size * hf.hidden_size * tokens
    assert entries["train_efficiency"]["value"] == pytest.approx((3 * forward + again) / (24 * 1e9), rel=1e-3)
    assert entries["forward_efficiency"]["value"] == pytest.approx(forward / (6 * 1e9), rel=1e-3)


def test_lengths_are_those_of_the_responses(tmp_path):
    entries, _ = calibrate(tmp_path)
    logs = np.log([10, 20, 30, 40]).reshape(2, 2)
    assert entries["mean_response"]["value"] == 25
    assert entries["mean_prompt"]["value"] == 5
    assert entries["response_sigma"]["value"] == pytest.approx(logs.std(), rel=1e-5)
    assert entries["difficulty_share"]["value"] == pytest.approx(1 - logs.var(axis=1).mean() / logs.var(), rel=1e-5)


def test_communication_is_the_ring_over_the_link(tmp_path):
    entries, constants = calibrate(tmp_path, tensor=2)
    speed = 2 * (1 / 2) * 300 * 64 * 4 / 0.01
    assert entries["communication_efficiency"]["value"] == pytest.approx(speed / constants.nvlink_bandwidth, rel=1e-5)


def test_decoding_is_recovered_from_servers_that_follow_the_planners_formula(tmp_path):
    """Requests whose seconds a token are overhead + (weights + cache) / (efficiency x bandwidth), as made."""
    overhead, efficiency, bandwidth = 0.004, 0.25, 1e9
    matrix = 2 * (64 * 128 + 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 2 * 64 * 100
    weights, cached = 2 * matrix / 2, 2 * 2 * 2 * 16 * 2 / 2  # of each of a server's two GPUs
    run = write_run(tmp_path / "run")
    write_timeline(run, 2, requests=0)
    file = SpanFile(run, "coordinator")
    for at, prompt in enumerate((1000, 3000, 9000, 20000, 30000)):  # one after the other: each is alone on its server
        tokens = 60 + 30 * (at % 3)
        held = prompt + tokens / 2
        seconds = 0.3 + tokens * (overhead + (weights + cached * held) / (efficiency * bandwidth))
        start = ZERO + 9 * at
        file.add("server http://a:1", f"p{at}-v0-s0.", start, start + seconds, prompt=prompt, tokens=tokens, version=0)
    file.write()
    out = tmp_path / "mine.yaml"
    arguments = [
        str(run),
        "--calibration",
        str(out),
        "--memory-bandwidth",
        str(bandwidth),
        "--out",
        str(tmp_path / "r"),
    ]
    assert main(arguments) == 0
    entries = yaml.safe_load(out.read_text())
    assert entries["decode_efficiency"]["value"] == pytest.approx(efficiency, rel=1e-3)
    assert entries["decode_overhead"]["value"] == pytest.approx(overhead, rel=1e-3)


@pytest.mark.parametrize(("servers", "parallel"), [(2, 2), (8, 1), (16, 1)])
def test_the_planner_gives_the_weight_sync_that_was_measured(tmp_path, servers, parallel):
    """Also where many servers read on one node: the planner lets them share the bandwidth of gathering."""
    run = write_run(tmp_path / "run", servers=servers, tensor_parallel=parallel)
    _, constants = calibrate(tmp_path, run=run)
    config = load_config(RECIPES / "qwen2.5_7b_8gpu.yaml", ["rollout.weight_sync=disk"])
    config = changed(config, {"rollout.servers": servers, "rollout.tensor_parallel": parallel})
    assert sync_seconds(Scenario(config, HF, constants)) == pytest.approx(4 + 6, rel=1e-4)


def test_a_servers_cache_is_the_planners_where_heads_are_stored_twice(tmp_path, monkeypatch):
    """Two key/value heads on four GPUs: each holds one of them, not half a one."""
    seen = []
    monkeypatch.setattr(calibrate_module, "kv_bytes_per_token", lambda *args: seen.append(args) or 1.0)
    calibrate(tmp_path, run=write_run(tmp_path / "run", tensor_parallel=4))
    assert seen == [(HF, 4, 2)]


def test_weight_sync_gives_what_it_took(tmp_path):
    _, constants = calibrate(tmp_path)
    model = 2 * (2 * (64 * 128 + 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 2 * 64 * 100)
    assert model / constants.gather_bandwidth + model / constants.disk_write == pytest.approx(4, rel=1e-5)
    assert model / constants.disk_read == pytest.approx(6, rel=1e-5)


def test_what_cannot_calibrate_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main([str(run), "--calibration", str(tmp_path / "c.yaml")]) == 2
    assert "monitor.timeline_every" in capsys.readouterr().err
    assert main([str(run), "--trace", str(tmp_path / "t.json")]) == 2
    assert "monitor.timeline_every" in capsys.readouterr().err
    cpu = write_run(tmp_path / "cpu", device="cpu")
    write_timeline(cpu, 2)
    assert main([str(cpu), "--calibration", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "report")]) == 2
    assert (tmp_path / "report.md").exists(), "what can be written is"
    assert "--peak-flops" in capsys.readouterr().err
    (cpu / "timeline" / "rank0.jsonl").write_text("rubbish\n")
    assert main([str(cpu)]) == 2
    assert "rank0.jsonl:1" in capsys.readouterr().err


def test_the_trace_is_written(tmp_path):
    run = write_run(tmp_path / "run")
    write_timeline(run, 2)
    write_timeline(run, 3)
    assert main([str(run), "--trace", str(tmp_path / "t.json"), "--out", str(tmp_path / "r")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert events[0]["args"]["name"] == "coordinator, rollout step 3", "the last recorded one"
