"""Which weights `megatron-dapo eval` means, and options of which one would not be read."""

from pathlib import Path

import pytest

from megatron_dapo.cli.eval import find_target
from megatron_dapo.config import ConfigError

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "dapo.yaml"
URLS = 'rollout.urls=["http://a:1"]'


def test_a_model_or_servers_or_the_configs_own_model(tmp_path):
    assert find_target(QUICKSTART, []).out == Path("evaluations") / "base"
    named = find_target(QUICKSTART, [], model=tmp_path / "other")
    assert (named.weights, named.config.model.path) == (tmp_path / "other", str(tmp_path / "other"))
    asked = find_target(QUICKSTART, [URLS])
    assert (asked.weights, asked.config.rollout.urls) == (None, ("http://a:1",))


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        ([URLS], {"model": Path("m")}, "--model m and rollout.urls"),
        ([], {"every": 5}, "--every 5: .* --watch"),
    ],
    ids=["two weights", "every"],
)
def test_an_option_that_would_not_be_read_is_refused(overrides, options, words):
    with pytest.raises(ConfigError, match=words):
        find_target(QUICKSTART, overrides, **options)
