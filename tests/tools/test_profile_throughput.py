"""Figures of a made-up run on GPUs, worked out by hand, and of the same run on CPUs, where some must be absent."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tools.profile_throughput import main
from tools.throughput import WORDS, human_seconds

PHASES = {"rollout": 30.0, "reward": 10.0, "logprob": 5.0, "update": 40.0, "weight_sync": 10.0}
MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
LAYER = 64 * 128 + 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64
EXPERTS = MODEL | {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2}
"""Of 16 experts a token passes two."""

MATRIX = 2 * LAYER + 64 + 64 * 100
"""Parameters that multiply each token: two layers, the last norm, the head."""


def line(step: int, *, slow: float = 1.0) -> dict:
    seconds = {f"timing/{phase}": value * slow for phase, value in PHASES.items()}
    return {
        "rollout_step": step,
        "optimizer_step": 4 * step,
        "tokens/generated": 8000,
        "tokens/trained": 6000,
        "response_length/mean": 100.0,
        "response_length/p95": 300.0,
        "response_length/max": 500.0,
        "bias/accepted_length": 120.0,
        "timing/evaluation": 0.0,
        "timing/checkpoint": 0.0,
        "timing/step": 100.0 * slow,
        **seconds,
    }


def write_run(
    folder: Path,
    *,
    device: str = "cuda:0",
    slow: float = 1.0,
    steps: int = 3,
    mode: str = "sync",
    max_staleness: int = 0,
    model: dict = MODEL,
    **rollout,
) -> Path:
    folder.mkdir()
    lines = [line(1, slow=50.0), *(line(step, slow=slow) for step in range(2, steps + 1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    fleet = {"servers": 2, "tensor_parallel": 2, "urls": []} | rollout
    config = {"run": {"mode": mode}, "rollout": fleet, "model": {"dtype": "bfloat16"}}
    config["algorithm"] = {"dynamic_sampling": {"max_staleness": max_staleness}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    layout = {"tensor": 2, "pipeline": 2, "virtual_pipeline": None, "context": 1, "data": 1}
    trainer = {"device": device, "layout": layout, "parameters": 1000}
    (folder / "manifest.json").write_text(json.dumps({"trainer": trainer, "model": {"config": model}}))
    return folder


def figures(out: Path) -> list[dict]:
    return [run["figures"] for run in json.loads(out.with_name("out.json").read_text())]


@pytest.fixture
def profiled(tmp_path) -> dict:
    out = tmp_path / "out"
    assert main([str(write_run(tmp_path / "one")), "--out", str(out), "--peak-flops", "1e9"]) == 0
    return figures(out)[0]


def test_speeds_are_tokens_over_the_seconds_of_their_phase(profiled):
    assert profiled["generated_per_s"] == 8000 / 40
    assert profiled["generated_per_s_gpu"] == 8000 / 40 / 4
    assert profiled["trained_per_s"] == 6000 / 40
    assert profiled["trained_per_s_gpu"] == 6000 / 40 / 4
    assert profiled["step_per_s_gpu"] == 6000 / 100 / 8


def test_the_table_has_every_figure(profiled):
    assert {key for key, *_ in WORDS["rows"]} == profiled.keys()


def measured(run: Path, *options: str) -> dict:
    out = run.parent / "out"
    assert main([str(run), "--out", str(out), *options]) == 0
    return figures(out)[0]


@pytest.mark.parametrize("keys", [{"mode": "async"}, {"mode": "sync", "max_staleness": 1}])
def test_servers_that_write_during_the_update_write_during_the_whole_step(tmp_path, keys):
    """As in the run's own `tokens_per_second/rollout`: `timing/rollout` is then only what the coordinator waits."""
    found = measured(write_run(tmp_path / "one", **keys))
    assert found["generated_per_s"] == 8000 / 100
    assert found["generated_per_s_gpu"] == 8000 / 100 / 4


@pytest.mark.parametrize("keys", [{"mode": "colocated"}, {"deterministic": True}])
def test_servers_of_which_nothing_goes_on_write_in_the_rollout(tmp_path, keys):
    assert measured(write_run(tmp_path / "one", max_staleness=1, **keys))["generated_per_s"] == 8000 / 40


def test_gpus_that_trainer_and_servers_share_count_once(tmp_path):
    shared = write_run(tmp_path / "shared", mode="colocated")
    assert measured(shared)["step_per_s_gpu"] == 6000 / 100 / 4
    assert main([str(shared), "--out", str(tmp_path / "out")]) == 0
    assert "4 GPUs, 4 train and 4 generate, in turns" in (tmp_path / "out.md").read_text()
    elsewhere = write_run(tmp_path / "elsewhere", urls=["http://a:1", "http://b:1"])
    assert measured(elsewhere)["step_per_s_gpu"] == 6000 / 100 / 8


def test_phases_are_shares_of_the_step_without_the_first_one(profiled):
    assert (profiled["step_s"], profiled["update_s"], profiled["update_share"]) == (100.0, 40.0, 0.4)
    assert profiled["other_s"] == pytest.approx(5.0)
    assert profiled["optimizer_step_s"] == 10.0


def test_mfu_is_its_formula(profiled):
    forward = 2 * MATRIX * 6000 + 2 * 2 * 64 * 120**2 * (6000 / 120)
    assert profiled["mfu"] == pytest.approx(3 * forward / (40 * 4 * 1e9))


def test_mfu_and_sync_of_a_mixture_are_those_of_active_and_of_all_parameters(tmp_path):
    layer = LAYER - 128 - 3 * 64 * 128 + 64 * 16 + 2 * 16  # no biases, norms of the heads, a router; experts below
    expert = 3 * 64 * 32
    found = measured(write_run(tmp_path / "one", model=EXPERTS), "--peak-flops", "1e9")
    active, whole = (2 * (layer + count * expert) + 64 + 64 * 100 for count in (2, 16))
    forward = 2 * active * 6000 + 2 * 2 * 64 * 120**2 * (6000 / 120)
    assert found["mfu"] == pytest.approx(3 * forward / (40 * 4 * 1e9))
    assert found["sync_mb_per_s"] == pytest.approx((whole + 64 * 100) * 2 / 1e6 / 10)


def test_weight_sync_is_the_models_bytes_over_its_seconds(profiled):
    assert profiled["sync_mb_per_s"] == pytest.approx((MATRIX + 64 * 100) * 2 / 1e6 / 10)


def test_the_tail_is_the_longest_over_the_mean(profiled):
    assert (profiled["length_mean"], profiled["length_max"], profiled["tail"]) == (100.0, 500.0, 5.0)


def test_a_run_on_cpus_has_no_figures_of_gpus(tmp_path, capsys):
    assert main([str(write_run(tmp_path / "one", device="cpu"))]) == 0
    shown = capsys.readouterr().out
    assert "no MFU" in shown
    assert "| MFU of the update | – |" in shown
    assert "| generated tokens/s, rollout and reward; whole step if written meanwhile | 200.0 |" in shown


def test_two_runs_stand_side_by_side_with_their_ratio(tmp_path, capsys):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", slow=2.0, steps=5)
    assert main([str(one), str(two)]) == 0
    shown = capsys.readouterr().out
    assert "| figure | one | two | second / first |" in shown
    assert "| rollout step | 100 s | 200 s | 2.00 |" in shown
    assert "| trained tokens/s, update | 150.0 | 75.0 | 0.50 |" in shown


def test_the_page_is_whole_and_harmless(tmp_path):
    hostile = write_run(tmp_path / "<script>alert(1)")
    assert main([str(hostile), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out.html").read_text()
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert "script" not in tags
    assert tags.count("table") == 1
    assert "://" not in text


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (0.0081, "8.1 ms"), (3.254, "3.25 s"), (320.4, "320 s"), (9600, "2 h 40 min")]
)
def test_seconds_are_said_as_a_person_says_them(seconds, said):
    assert human_seconds(seconds) == said


def test_the_page_stacks_the_phases_and_leaves_them_out_of_its_table(tmp_path):
    assert main([str(write_run(tmp_path / "one")), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out.html").read_text()
    assert "one, 100 s a step" in text
    assert re.search(r'class="dot c4"></i>update <b>40 s, 40.0%</b>', text)
    assert "update, share of the step" not in text
    assert "Where the update goes" not in text, "this run has no timeline"


def test_what_cannot_be_measured_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([str(write_run(tmp_path / "one")), "--skip", "3"]) == 2
    assert "none is left to measure" in capsys.readouterr().err
    short = write_run(tmp_path / "short")
    (short / "metrics.jsonl").write_text('{"rollout_step": 1, "optimizer_step": 1}\n' * 1)
    assert main([str(short), "--skip", "0"]) == 2
    assert "lacks timing/step" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [["--skip", "-1"], ["--peak-flops", "0"], ["--peak-flops", "nan"], ["--tail-share", "1.5"], ["--skip", "x"]],
    ids=" ".join,
)
def test_an_impossible_option_is_refused(tmp_path, capsys, options):
    with pytest.raises(SystemExit, match="2"):
        main([str(write_run(tmp_path / "one")), *options])
    assert options[0] in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert main([str(write_run(tmp_path / "one")), "--out", str(tmp_path / "no" / "report")]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'no' / 'report'}")
