"""`python -m tools.other_splits`: the same GPUs, other shares of them."""

import re
from pathlib import Path

import pytest

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.plan.planner import make_plan
from megatron_dapo.plan.scenario import BUILT_IN, Scenario, load_calibration
from tests.plan.conftest import RECIPES
from tools.other_splits import other_splits, other_splits_command


def test_other_splits_use_the_same_gpus():
    config = load_config(RECIPES / "h100_128.yaml")
    plan = make_plan(Scenario(config, BUILT_IN["Qwen2.5-32B"], load_calibration()))
    splits = [(split, split.case.config) for split in other_splits(plan)]
    assert [split is plan for split, _ in splits].count(True) == 1
    assert all(124 < one.actor.layout.world_size + 4 * one.rollout.servers <= 128 for _, one in splits)
    steps = [(split.step.rollout_s, one.rollout.servers) for split, one in splits if split.fits]
    assert len(steps) >= 4
    assert sorted(steps, key=lambda one: one[0]) == sorted(steps, key=lambda one: -one[1]), "more servers, less rollout"


def test_the_table_has_the_configs_own_split_and_the_experts(capsys):
    other_splits_command(RECIPES.parent / "qwen3_30b_a3b" / "h100_16.yaml")
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["trainer", "layout", "servers"]
    [own] = [row for row in rows if " * " in row]
    assert re.match(r"8 GPUs \*  +TP 2 PP 1 DP 1 EP 8  +2 ", own)
    assert len(rows) > 2


def test_what_cannot_be_split_is_said():
    for recipe, words in (("h100_32_colocated", "cannot be split otherwise"), ("paper", "does not fit")):
        with pytest.raises(ConfigError, match=words):
            other_splits_command(Path(RECIPES / f"{recipe}.yaml"))
