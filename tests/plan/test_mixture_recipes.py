"""The recipes of Qwen3-30B-A3B: they fit, and no published layout is faster, by the plan."""

import dataclasses
import json
from functools import cache

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import load_config
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.plan.memory import server_memory, trainer_memory
from megatron_dapo.plan.planner import find_misfits, make_plan
from megatron_dapo.plan.rollout import groups
from megatron_dapo.plan.scenario import Scenario, load_calibration, model_dimensions
from megatron_dapo.plan.step_plan import fleet_of
from megatron_dapo.plan.trainer_time import log_prob_time, update_time
from tests.plan.conftest import MIXTURES
from tools.plan_search import search

GPUS = {"h100_16": 16, "h100_32": 32, "h100_16_colocated": 16, "h100_32_colocated": 32}
PUBLISHED = [
    ("h100_16", {"tensor": 4, "data": 2, "expert": 8}),
    ("h100_16_colocated", {"tensor": 4, "data": 4, "expert": 8}),
    ("h100_16_colocated", {"tensor": 4, "pipeline": 2, "virtual_pipeline": 2, "data": 2, "expert": 2}),
    ("h100_32", {"pipeline": 2, "data": 8, "expert": 8}),
    ("h100_32_colocated", {"tensor": 2, "data": 16, "expert": 8}),
    ("h100_32_colocated", {"data": 32, "expert": 8}),
]
"""Layouts of slime, SkyRL, verl and NeMo-RL (examples/qwen3_30b_a3b/README.md), on as many GPUs."""


def recipe(name: str) -> Scenario:
    config = load_config(MIXTURES / f"{name}.yaml")
    return Scenario(config, model_dimensions(config.model.path)[0], load_calibration())


@pytest.mark.parametrize("name", GPUS)
def test_a_recipe_fits_on_its_gpus(name):
    plan = make_plan(recipe(name), steps=1)
    assert not plan.misfits
    assert plan.step.gpus == GPUS[name]
    assert plan.step.optimizer_steps == 16
    assert plan.case.config.run.checkpoint_every == max(1, 3600 // plan.step.seconds)
    assert 0.05 < plan.step.mfu < plan.case.constants.train_efficiency


@cache
def lengths() -> np.ndarray:
    """Two mini-batches of sequences."""
    drawn = groups(recipe("h100_16").workload, seed=0)
    return np.array([length for _ in range(64) for length in next(drawn).lengths]) + 200


def training_seconds(case: Scenario) -> float:
    """Of a rollout step's log-probs and updates, from two mini-batches of them."""
    own = lengths()
    state = max((rank.state for rank in trainer_memory(case)), key=lambda one: one.total)
    return 8 * log_prob_time(case, own).seconds + 8 * sum(
        update_time(case, part, state).seconds for part in (own[:512], own[512:])
    )


@pytest.mark.parametrize(("name", "sizes"), PUBLISHED, ids=str)
def test_no_published_layout_is_faster(name, sizes):
    """At its best: recompute, budget, offload and servers are searched. 1%: the plainer of two equals is shipped."""
    case = recipe(name)
    layout = LayoutConfig(**sizes, sequence_parallel=sizes.get("tensor", 1) > 1)
    servers = case.gpus if name.endswith("colocated") else case.gpus - layout.world_size
    other = case.changed({"actor.layout": layout, "rollout.servers": servers // case.config.rollout.tensor_parallel})
    assert other.gpus == case.gpus
    keep = [f"actor.layout.{field.name}" for field in dataclasses.fields(LayoutConfig)]
    for best in search(other, keep=keep, best=1):
        assert best.case.config.actor.layout == layout
        assert best.step.seconds > 0.99 * make_plan(case).step.seconds


def test_a_decode_step_reads_those_experts_that_responses_are_sent_to():
    case = recipe("h100_16")
    fleet, rollout, constants = fleet_of(case, server_memory(case)), case.config.rollout, case.constants
    speed = constants.memory_bandwidth * constants.decode_efficiency * rollout.tensor_parallel
    overhead = constants.decode_overhead + (rollout.tensor_parallel > 1) * 2 * 48 * constants.decode_reduce_latency
    experts = 48 * 128 * 3 * 2048 * 768
    for each, missed in ((1, 120 / 128), (2, (120 / 128) ** 2), (4, (120 / 128) ** 4)):
        read = (fleet.step_s(each * rollout.servers, 0) - overhead) * speed
        assert read == pytest.approx(2 * (30532122624 - experts * missed))


def test_where_experts_do_not_fit_more_ranks_for_them_are_found():
    """Of as many GPUs."""
    case = recipe("h100_16").changed({"actor.layout.expert": 2})
    assert find_misfits(case)
    [best] = search(case, keep=["actor.layout.tensor", "actor.layout.pipeline"], best=1)
    assert best.case.config.actor.layout.expert > 2


def test_the_command_tells_active_parameters_and_the_experts_share():
    file = str(MIXTURES / "h100_16.yaml")
    text = CliRunner().invoke(app, ["plan", file])
    assert text.exit_code == 0
    for words in (
        "30.53 billion parameters, 3.35 billion active",
        "experts EP 8 x ETP 1",
        "tokens to experts and back",
    ):
        assert words in text.stdout
    tree = json.loads(CliRunner().invoke(app, ["plan", file, "--json"]).stdout)
    assert (tree["model"]["parameters"], tree["model"]["active"]) == (30532122624, 3353032704)


def test_a_lower_share_of_experts_that_are_busy_takes_less(constants):
    case = recipe("h100_16")
    even = dataclasses.replace(case, constants=dataclasses.replace(constants, expert_imbalance=1.0))
    assert training_seconds(even) < training_seconds(case)
    peaks = [trainer_memory(one)[0].peaks["update"] for one in (even, case)]
    assert peaks[0] < peaks[1]
