"""CUDA's choices over gloo against one process without them: updates and certificates of one actor, in turns."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import LoraConfig, OffloadConfig
from tests.actor.checkpoint.test_checkpoint import train
from tests.actor.gloo import RankPlace, run_ranks
from tests.actor.mini_batches import (
    TEMPERATURE,
    Columns,
    actor_config,
    columns,
    mini_batch,
    relative_error,
    start_actor,
)
from tests.actor.tiny import MIXTURE, save_tiny
from tests.emulated.cuda_choices import cuda_choices
from tools.actor_job import loss_and_gradients

OPTIMIZER = {"lr": 1e-3, "eps": 1e-2}
"""With AdamW's usual epsilon a gradient of almost 0 is a whole step, and so is its rounding."""

BOUND = 5e-6
"""Relative, in float32 after four steps."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("moe"), MIXTURE, tied=False)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What one actor gave."""

    gradients: list[dict[str, torch.Tensor] | None]
    reports: list[tuple[float, float]]
    """(loss, gradient norm) of each step; an update makes two."""

    log_probs: np.ndarray | None
    seen: dict[str, int]


def turns(
    place: RankPlace, folder: Path, data: Columns, layout: dict[str, Any], options: dict[str, Any], forced: bool
) -> Turns:
    """Certificate, updates, certificate, certificate, updates, log-probs, certificate."""
    with cuda_choices() if forced else nullcontext({}) as seen:
        options = dict(options)
        config = actor_config(layout, optimizer=OPTIMIZER | options.pop("optimizer", {}), **options)
        actor = start_actor(place, folder, config)
        batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
        gradients, reports = [], []

        def certify() -> None:
            result = loss_and_gradients(actor, batch, PolicyObjective(), TEMPERATURE)
            gradients.append(result and result[1])

        def update() -> None:
            made = actor.update([batch, batch], PolicyObjective(), TEMPERATURE)
            reports.extend((report.loss, report.grad_norm) for report in made)

        for step in (certify, update, certify, certify, update):
            step()
        found = actor.log_probs(data.responses, batch.plan, TEMPERATURE)
        certify()
        return Turns(gradients=gradients, reports=reports, log_probs=found and found.log_probs, seen=dict(seen))


def size(layout: dict[str, Any]) -> int:
    return int(np.prod([layout.get(name, 1) for name in ("tensor", "pipeline", "context", "data")]))


_alone: dict[Path, Turns] = {}


def alone(folder: Path, data: Columns) -> Turns:
    """One process with the CPU's own choices."""
    if folder not in _alone:
        [_alone[folder]] = run_ranks(1, turns, folder, data, {}, {}, False)
    return _alone[folder]


NOT_DISTRIBUTED = {"optimizer": {"distributed": False}}
CASES = [
    ("tied", {"context": 2}, NOT_DISTRIBUTED),
    ("tied", {"data": 2}, {"recompute": "full", "offload": OffloadConfig(between_phases="all")}),
    ("tied", {"data": 2}, {"fused_linear_log_prob": True, "offload": OffloadConfig(optimizer_state=True)}),
    ("tied", {"data": 2, "pipeline": 2, "virtual_pipeline": 2}, {}),
    ("experts", {"data": 2, "expert": 2}, {"recompute": "full"}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("model", {"data": 2, "tensor": 2, "sequence_parallel": True}, {}),
            ("model", {"data": 2}, {}),
            ("model", {"data": 2}, NOT_DISTRIBUTED),
            ("model", {"context": 2}, {}),
            ("model", {"data": 2, "pipeline": 2}, {}),
            ("tied", {"data": 2, "pipeline": 2}, NOT_DISTRIBUTED),
            ("model", {"pipeline": 2, "virtual_pipeline": 2}, {}),
            ("experts", {"data": 4, "expert": 2}, {}),
            ("experts", {"data": 2, "tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 2}, {}),
        )
    ),
]


@pytest.mark.parametrize(("name", "layout", "options"), CASES, ids=str)
def test_updates_and_certificates_in_turns_are_those_of_one_process(request, name, layout, options):
    folder = request.getfixturevalue(name)
    data = columns(folder)
    wanted = alone(folder, data)
    ranks = run_ranks(size(layout), turns, folder, data, layout, options, True, timeout_s=240)
    got = ranks[0]
    errors = [relative_error(one, other)[""] for one, other in zip(got.gradients, wanted.gradients, strict=True)]
    assert max(errors) < BOUND
    np.testing.assert_allclose(got.reports, wanted.reports, rtol=BOUND)
    np.testing.assert_allclose(got.log_probs, wanted.log_probs, rtol=0, atol=1e-5)
    # The choices were at work: otherwise this test would compare the CPU with itself.
    for rank in ranks:
        assert rank.seen["fused weight gradients"] > 0
        if layout.get("data", 1) * layout.get("context", 1) > 1:
            assert rank.seen["reductions during backward"] >= 6


@pytest.mark.parametrize(
    "layout", [{"data": 2}, pytest.param({"data": 2, "pipeline": 2}, marks=pytest.mark.slow)], ids=str
)
def test_adapters_are_trained_without_fused_or_early_gradients(layout, model):
    """Their gradients come from those of the weights, which must exist, and with no hook of the wrapper's."""
    data, options = columns(model), {"lora": LoraConfig(rank=4)}
    [wanted] = run_ranks(1, turns, model, data, {}, options, False)
    ranks = run_ranks(size(layout), turns, model, data, layout, options, True, timeout_s=240)
    pairs = zip(ranks[0].gradients, wanted.gradients, strict=True)
    assert max(relative_error(one, other)[""] for one, other in pairs) < BOUND
    np.testing.assert_allclose(ranks[0].reports, wanted.reports, rtol=BOUND)
    assert [rank.seen for rank in ranks] == [{}] * size(layout)


def trained(
    place: RankPlace, folder: Path, data: Columns, layout: dict[str, Any], save: Path | None, load: Path | None
) -> list[tuple[Any, ...]]:
    """(step, loss, norm, rate) of updates before a checkpoint and after it; on more than one rank as on CUDA."""
    with cuda_choices() if size(layout) > 1 else nullcontext():
        return train(place, folder, layout, data, {}, save=save, load=load)


@pytest.mark.parametrize(
    ("written", "read"), [({"data": 2}, {}), pytest.param({}, {"data": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_checkpoint_of_many_gradient_buckets_goes_on_at_another_layout(written, read, model, tmp_path):
    """The distributed optimizer cuts each bucket over the ranks; a tiny model on the CPU has one."""
    data = columns(model)
    without_break = run_ranks(size(written), trained, model, data, written, tmp_path / "step", None)[0]
    resumed = run_ranks(size(read), trained, model, data, read, None, tmp_path / "step")[0]
    np.testing.assert_allclose(resumed, without_break[2:], rtol=1e-4)
