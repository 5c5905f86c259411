"""Which weights `megatron-dapo eval` means, and options of which one would not be read."""

from pathlib import Path

import pytest

from megatron_dapo.cli.eval import find_target
from megatron_dapo.config import ConfigError

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


def test_an_option_that_would_not_be_read_is_refused():
    with pytest.raises(ConfigError, match=r"--model m and rollout\.urls"):
        find_target(QUICKSTART, [URLS], Path("m"))
