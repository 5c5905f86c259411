"""What a rank's clock sees of Megatron's schedules; timing an update changes none of its numbers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dapo.actor.step_data import UpdateMetrics
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.tiny import save_tiny

STEPS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=False)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


def timed_update(place: RankPlace, folder: Path, layout: dict[str, Any], data: Columns, timed: bool):
    config = actor_config(layout)
    actor = start_actor(place, folder, config)
    batch = mini_batch(data, config)
    arguments = ([batch] * STEPS, PolicyObjective(), TEMPERATURE)
    if not timed:
        return actor.update(*arguments), [], None, 0
    with actor.timed() as clock:
        reports = actor.update(*arguments)
    return reports, clock.times(), actor.time_tensor_parallel(16), len(batch.plan.micro_batches[0])


LAYOUTS = [{}, {"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"data": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_pass_of_every_rank_is_seen_in_its_place(gloo, layout, model, data):
    ranks = int(np.prod([layout.get(name, 1) for name in ("tensor", "pipeline", "data")]))
    chunks = layout.get("virtual_pipeline", 1)
    for reports, times, probe, micro_batches in gloo(ranks, timed_update, model, layout, data, True):
        assert isinstance(reports[0], UpdateMetrics)
        of: dict[str, list] = {}
        for name, start, end, about in times:
            assert start <= end
            of.setdefault(name, []).append((start, end, about))
        assert len(of["forward-compute"]) == len(of["backward-compute"]) == STEPS * micro_batches * chunks
        assert len(of["forward-backward"]) == len(of["optimizer"]) == STEPS
        tokens = sum(about["tokens"] for *_, about in of["forward-compute"])
        assert tokens > 0
        whole = of["forward-backward"]
        for start, end, _ in (*of["forward-compute"], *of["backward-compute"]):
            assert any(first <= start and end <= last for first, last, _ in whole), "a pass outside of its schedule"
        passes = sorted([*of["forward-compute"], *of["backward-compute"]], key=lambda each: each[0])
        assert all(one[1] <= other[0] + 1e-6 for one, other in pairwise(passes)), "two at once"
        assert any("recv" in name for name in of) == ("pipeline" in layout)
        assert (probe is not None) == ("tensor" in layout)
        if probe is not None:
            assert (probe["ranks"], probe["seconds"] > 0) == (2, True)


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}], ids=str)
def test_a_timed_update_is_the_same_update(gloo, layout, model, data):
    ranks = layout.get("tensor", 1)
    plain = gloo(ranks, timed_update, model, layout, data, False)[0][0]
    timed = gloo(ranks, timed_update, model, layout, data, True)[0][0]
    assert [(report.loss, report.grad_norm) for report in plain] == [(r.loss, r.grad_norm) for r in timed]
