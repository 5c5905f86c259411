"""The recipes of Qwen3-30B-A3B: they fit, and no neighbouring or published layout trains faster, by the plan."""

import dataclasses
import itertools
import json
from functools import cache

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_dapo.cli.main import app
from megatron_dapo.config import load_config
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.plan.memory import trainer_memory
from megatron_dapo.plan.planner import find_misfits, least_recompute, make_plan, possible, remedies
from megatron_dapo.plan.rollout import groups
from megatron_dapo.plan.scenario import Scenario, load_calibration, model_dimensions
from megatron_dapo.plan.trainer_time import log_prob_time, update_time
from tests.plan.conftest import MIXTURES

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
    assert plan.fits, plan.misfits
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


def best_of(case: Scenario, layout: LayoutConfig) -> float | None:
    """With the recompute, offload and budget that fit and take least; None: none fits."""
    tokens = case.config.model.context_length // layout.context
    found = []
    for offload in (False, True):
        changes = {"actor.layout": layout, "actor.recompute": "none", "actor.micro_batch_tokens": tokens}
        other = case.changed(changes | {"actor.offload.optimizer_state": offload})
        if possible(other):
            other = other.changed({"actor.recompute": least_recompute(other)})
            found += [] if find_misfits(other) else [training_seconds(other)]
    return min(found, default=None)


def neighbours(layout: LayoutConfig) -> set[LayoutConfig]:
    """One way of cutting twice as fine and another half as fine, on as many GPUs; other cuts of the experts."""
    ways = itertools.permutations(("tensor", "pipeline", "context", "data"), 2)
    found = [{up: getattr(layout, up) * 2, down: getattr(layout, down) // 2} for up, down in ways]
    apart = layout.tensor * layout.context
    found += [{"expert": size, "expert_tensor": 1} for size in (2, 4, apart, 2 * apart)] + [{"expert": 1}]
    made = set()
    for sizes in (one for one in found if min(one.values()) > 0):
        other = dataclasses.replace(layout, **sizes)
        other = dataclasses.replace(other, sequence_parallel=other.tensor > 1)
        made.add(dataclasses.replace(other, expert_tensor=other.tensor) if other.expert == 1 else other)
    return {other for other in made - {layout} if other.world_size == layout.world_size}


@pytest.mark.parametrize("name", GPUS)
def test_no_neighbour_trains_faster(name):
    case = recipe(name)
    own = training_seconds(case)
    others = {other: best_of(case, other) for other in neighbours(case.config.actor.layout)}
    assert len([seconds for seconds in others.values() if seconds is not None]) >= 2
    slower = {other: seconds for other, seconds in others.items() if seconds is not None and seconds < own}
    assert not slower, (own, slower)


@pytest.mark.parametrize(("name", "sizes"), PUBLISHED, ids=str)
def test_no_published_layout_trains_faster(name, sizes):
    case = recipe(name)
    layout = LayoutConfig(**sizes, sequence_parallel=sizes.get("tensor", 1) > 1)
    assert layout.world_size == case.config.actor.layout.world_size
    other = best_of(case, layout)
    assert other is None or other > training_seconds(case)


def test_where_experts_do_not_fit_more_ranks_for_them_are_named():
    """On 8 GPUs, before more GPUs are."""
    case = recipe("h100_16").changed({"actor.layout.expert": 2})
    [way] = remedies(case)
    assert way["actor.layout.expert"] > 2
    assert not find_misfits(case.changed(way))


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
