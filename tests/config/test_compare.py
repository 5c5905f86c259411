"""Differences between configs and from the paper."""

import re
from pathlib import Path

import pytest

from megatron_dapo.cli.diff import diff
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.config_diff import departures, stated
from megatron_dapo.config.load import ABSENT, PRESETS, differences, flatten, flatten_config, shown
from tests.config.conftest import MINIMAL


@pytest.fixture
def write(tmp_path):
    def file(name: str, text: str = "") -> str:
        (tmp_path / name).write_text(MINIMAL + text)
        return str(tmp_path / name)

    return file


def test_every_setting_of_the_paper_is_a_key_and_its_default_is_the_papers(write):
    """Written down twice on purpose: a default that is changed by mistake shows as a difference."""
    flat = flatten_config(load_config(write("a.yaml")))
    assert stated().keys() <= set(flat)
    assert departures(flat) == []


UNRELATED = """
    run.dir run.rollout_steps run.seed run.resume run.resume_step run.on_damaged_checkpoint run.max_restarts
    run.checkpoint_every run.checkpoint_minutes run.keep_checkpoints run.checkpoint_in_background run.export_at_end
    run.start_deadline_s run.step_deadline_s model.path model.context_length model.stop_token_ids model.dtype
    model.fp32_head
    algorithm.dynamic_sampling.max_oversampling algorithm.dynamic_sampling.initial_pass_rate
    algorithm.dynamic_sampling.surplus algorithm.dynamic_sampling.ahead
    rollout.start_quorum rollout.client_processes
    rollout.servers rollout.tensor_parallel rollout.urls rollout.api_key_file rollout.host rollout.port
    rollout.max_running_requests rollout.kv_cache_tokens rollout.memory_fraction rollout.deterministic
    rollout.on_publish rollout.quantization
    rollout.weight_sync rollout.sync_bucket_mb rollout.sync_deadline_s rollout.stream_every rollout.request_deadline_s
    rollout.max_attempts rollout.fleet_deadline_s rollout.extra_args reward.workers reward.algebra_workers
    reward.environment_workers reward.code_reads
    reward.timeout_s reward.memory_mb evaluation.path evaluation.every evaluation.limit evaluation.greedy
    evaluation.forbidden_start evaluation.schema actor.optimizer.distributed actor.optimizer.on_cpu
    actor.optimizer.compact actor.device actor.micro_batch_tokens actor.recompute actor.overlap actor.fp8
    actor.fp8_recipe actor.logprob_chunk_tokens actor.fused_linear_log_prob actor.threads
"""
SECTIONS = (
    "data.",
    "evaluation.",
    "reward.remote.",
    "reward.remote_environment.",
    "actor.layout.",
    "actor.offload.",
    "monitor.",
    "rollout.speculative.",
)


def test_every_key_is_compared_or_known_not_to_be(write):
    """A new key must be decided on: does it change what is learnt? Then it belongs into presets/paper.yaml."""
    flat = flatten_config(load_config(write("a.yaml")))
    left = {key for key in flat if key not in stated() and not key.startswith(SECTIONS)}
    assert left <= set(UNRELATED.split()), "neither in paper.yaml nor here"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_loads_alone_and_sets_what_it_says_with_its_source(write, preset):
    flat = flatten_config(load_config(write("a.yaml", f"preset: {preset}\n")))
    assert departures(flat, preset) == []
    for each in stated(preset).values():
        assert flat[each.key] == each.value or preset == "paper"
        assert len(each.where) >= 4, f"{each.key} has no source"
    left = {each.key for each in departures(flat)}
    own = {key for key, each in stated(preset).items() if not each.where.startswith("DAPO: ")}
    assert left <= own
    assert bool(left) == (preset != "paper"), "it differs from the paper"


def test_what_the_review_named_is_no_longer_as_in_the_paper(write, capsys):
    text = """
algorithm: {advantage: {epsilon: 10.0, ddof: 0}, overlong: {filter: true}, dynamic_sampling: {max_staleness: 5}}
rollout: {temperature: 0.6, top_p: 0.7}
actor: {optimizer: {betas: [0.5, 0.6]}}
"""
    text = MINIMAL.replace("run: {", "run: {mode: async, ") + text.partition("\n")[2]
    (path := Path(write("one.yaml"))).write_text(text)
    flat = flatten_config(load_config(path))
    assert {each.key for each in departures(flat)} == {
        "run.mode",
        "algorithm.advantage.epsilon",
        "algorithm.advantage.ddof",
        "algorithm.overlong.filter",
        "algorithm.importance.mode",
        "algorithm.dynamic_sampling.max_staleness",
        "rollout.temperature",
        "rollout.top_p",
        "actor.optimizer.betas",
    }
    diff(str(path), "verl")
    out = capsys.readouterr().out
    assert "verl_legacy" in out
    assert "Not compared: the model, prompts" in out
    assert "No key says: it generates whole batches" in out


def test_taking_turns_on_one_gpu_and_auto_are_the_papers_too(write):
    one = write("one.yaml", "algorithm: {importance: {mode: none}}\n")
    flat = flatten_config(load_config(one)) | {"run.mode": "colocated"}
    assert departures(flat) == []


def test_auto_is_shown_with_what_it_stands_for(write, capsys):
    """It depends on staleness and on whether the loss corrects by itself."""
    carrying = "algorithm:\n  dynamic_sampling: {max_staleness: 1}\n"
    diff(write("a.yaml", carrying), "paper")
    assert re.search(r"importance\.mode +auto \(truncated\) +auto \(none\) ", capsys.readouterr().out)
    diff(write("b.yaml", carrying + "  policy_loss: reinforce\n"), "paper")
    assert "importance.mode" not in capsys.readouterr().out


def test_a_departure_names_the_papers_value(write):
    flat = flatten_config(load_config(write("a.yaml"), ["algorithm.clip.high=0.2", "algorithm.kl.coefficient=0.001"]))
    found = {each.key: each.value for each in departures(flat)}
    assert found == {"algorithm.clip.high": 0.28, "algorithm.kl.coefficient": 0.0}


def test_differences_include_keys_of_one_side_only():
    found = differences(flatten({"a": {"b": 1, "c": [1]}}), flatten({"a": {"b": 2, "c": [1]}, "d": None}))
    assert list(found.items()) == [("a.b", (1, 2)), ("d", (ABSENT, None))]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "none"), (True, "true"), (1e-6, "1e-06"), (20.0, "20"), ([0.9, 0.98], "[0.9, 0.98]")]
)
def test_values_are_shown_as_in_a_file(value, text):
    assert shown(value) == text


def test_diff_of_two_files(write, capsys):
    one = write("one.yaml", "algorithm: {clip: {high: 0.2}, group_size: 8, mini_batch_responses: 256}\n")
    other = write("other.yaml", "algorithm: {group_size: 8, mini_batch_responses: 256}\nactor: {threads: 4}\n")
    diff(one, other)
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if "." in line}
    assert rows["algorithm.clip.high"] == ["0.2", "0.28", "0.28"]
    assert rows["actor.threads"] == ["1", "4", "not", "stated"]
    assert rows["algorithm.group_size"] == ["8", "8", "16"], "alike, but not the paper's"
    assert "algorithm.clip.low" not in rows


def test_diff_with_the_paper_by_name_on_either_side(write, capsys):
    file = write("one.yaml", "actor: {optimizer: {lr: 1e-5}}\n")
    diff(file, "paper")
    assert "actor.optimizer.lr" in capsys.readouterr().out
    diff("paper", file)
    row = next(line for line in capsys.readouterr().out.splitlines() if "optimizer.lr" in line)
    assert row.split()[1:3] == ["1e-05", "1e-06"]
    diff(write("same.yaml"), "paper")
    assert "as in the paper" in capsys.readouterr().out


def test_diff_loads_strictly(write):
    with pytest.raises(ConfigError, match=r"did you mean algorithm\.clip\.high\?"):
        diff(write("one.yaml", "algorithm: {clip: {hihg: 0.2}}\n"), "paper")
    with pytest.raises(ConfigError, match="name at least one config file"):
        diff("paper", "paper")


def test_a_run_has_a_config_and_what_is_neither_hears_of_the_presets(write, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    write("run/config.yaml", "algorithm: {clip: {high: 0.5}}\n")
    diff(write("a.yaml"), str(tmp_path / "run"))
    assert "algorithm.clip.high" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"config file nopreset: No such file.*; presets: .*verl"):
        diff(write("a.yaml"), "nopreset")
