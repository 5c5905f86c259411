"""Which weights `megatron-dapo eval` means, and options of which one would not be read."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_dapo.cli.command_line import config_of
from megatron_dapo.cli.eval import evaluate, find_target
from megatron_dapo.config import ConfigError, dump_config, load_config

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "dapo.yaml"
URLS = 'rollout.urls=["http://a:1"]'


def test_a_model_or_servers_or_the_configs_own_model(tmp_path):
    own, folder, step = find_target(QUICKSTART, [], None)
    assert (own.rollout.urls, folder, step) == ((), Path("evaluations") / "base", None)
    assert find_target(QUICKSTART, [], tmp_path / "other")[0].model.path == str(tmp_path / "other")
    asked, folder, _ = find_target(QUICKSTART, [URLS], None)
    assert (asked.rollout.urls, folder) == (("http://a:1",), Path("evaluations") / "servers")


def test_a_models_folder_needs_no_config(tmp_path):
    base = QUICKSTART.with_name("base")
    config, folder, step = find_target(base, ["evaluation.path=p.jsonl", "reward.verifier=choice"], None)
    assert (config.model.path, config.evaluation.path) == (str(base), "p.jsonl")
    assert (config.reward.verifier, folder, step) == ("choice", Path("evaluations") / "base", None)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run that was started in another folder than this one, with relative paths."""
    started, now = tmp_path / "started", tmp_path / "now"
    shutil.copytree(QUICKSTART.with_name("base"), started / "runs" / "one" / "model")
    shutil.copytree(QUICKSTART.with_name("base"), started / "base")
    (started / "held.jsonl").touch()
    now.mkdir()
    monkeypatch.chdir(now)
    keys = ["model.path=base", "data.path=gone.jsonl", "evaluation.path=held.jsonl"]
    (started / "runs" / "one" / "config.yaml").write_text(dump_config(load_config(QUICKSTART, keys)))
    (started / "runs" / "one" / "manifest.json").write_text(json.dumps({"folder": str(started)}))
    return started / "runs" / "one"


def test_the_relative_paths_of_a_run_are_those_of_the_folder_where_it_was_started(run):
    started = run.parents[1]
    config = config_of(run)
    assert config.model.path == str(started / "base")
    assert config.evaluation.path == str(started / "held.jsonl")
    assert config.data.path == "gone.jsonl", "what is not there any more may be here"
    assert config_of(run, ["evaluation.path=other.jsonl"]).evaluation.path == "other.jsonl"
    for text in ("{}", "{", "[]"):  # of a run of before; damaged
        (run / "manifest.json").write_text(text)
        assert config_of(run).evaluation.path == "held.jsonl"


def test_results_of_a_runs_model_lie_in_the_run(run):
    config, folder, step = find_target(run / "model", [], None)
    assert (config.model.path, folder, step) == (str(run / "model"), run / "evaluations" / "model", None)
    assert config.evaluation.path == str(run.parents[1] / "held.jsonl")


def test_results_are_not_written_over_a_run(run):
    (run / "ledger.jsonl").write_text('{"event": "dispatched"}\n')
    with pytest.raises(ConfigError, match=r"--out .*runs/one: holds a run"):
        evaluate(str(run), out=run)


def test_an_option_that_would_not_be_read_is_refused():
    with pytest.raises(ConfigError, match=r"--model m and rollout\.urls"):
        find_target(QUICKSTART, [URLS], Path("m"))
