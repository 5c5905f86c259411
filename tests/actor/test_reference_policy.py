"""The KL term's reference: the starting weights, whatever was trained since; training goes on untouched by them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dapo.algorithm.policy_loss import PolicyObjective
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, actor_config, columns, mini_batch, start_actor
from tests.actor.tiny import save_tiny


def run(place: RankPlace, folder: Path, layout: dict[str, Any], look: bool) -> list[Any]:
    config = actor_config(layout, optimizer={"lr": 1e-2})
    data = columns(folder)
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    actor = start_actor(place, folder, config, keep_reference=True)
    results = [actor.log_probs(data.responses, batch.plan, TEMPERATURE)]
    for _ in range(2):
        actor.update([batch], PolicyObjective(), TEMPERATURE)
        if look:
            results.append(actor.reference_log_probs(data.responses, batch.plan, TEMPERATURE))
    results.append(actor.log_probs(data.responses, batch.plan, TEMPERATURE))
    return results


@pytest.mark.parametrize(
    "layout",
    [pytest.param({}, marks=pytest.mark.slow), pytest.param({"tensor": 2}, marks=pytest.mark.slow), {"data": 2}],
    ids=str,
)
def test_the_reference_stays_and_training_does_not_notice(gloo, layout, tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3", tied=True)
    ranks = int(np.prod([*layout.values(), 1]))
    start, first, second, trained = gloo(ranks, run, folder, layout, True)[0]
    np.testing.assert_array_equal(first.log_probs, start.log_probs)
    np.testing.assert_array_equal(second.log_probs, start.log_probs)
    assert np.abs(trained.log_probs - start.log_probs).max() > 1e-3
    undisturbed = gloo(ranks, run, folder, layout, False)[0][-1]
    np.testing.assert_array_equal(trained.log_probs, undisturbed.log_probs)


def reset(place: RankPlace, folder: Path, layout: dict[str, Any], distributed: bool, work: Path) -> list[Any]:
    """Two updates, a reset, another update; then a fresh actor goes on from what was stored after the reset."""
    optimizer = {"lr": 1e-2, "distributed": distributed}
    config, data = actor_config(layout, optimizer=optimizer), columns(folder)
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    objective = PolicyObjective()

    def reference(actor: Any) -> Any:
        return actor.reference_log_probs(data.responses, batch.plan, TEMPERATURE)

    def own(actor: Any) -> Any:
        return actor.log_probs(data.responses, batch.plan, TEMPERATURE)

    actor = start_actor(place, folder, config, keep_reference=True)
    actor.update([batch] * 2, objective, TEMPERATURE)
    before = own(actor)
    actor.export_hf(work / "reference")
    actor.reset_reference(optimizer=True)
    renewed = reference(actor)
    actor.save_checkpoint(work / "checkpoint")
    actor.update([batch], objective, TEMPERATURE)
    went_on = [before, renewed, reference(actor), own(actor)]
    actor.load_reference(work / "reference")
    actor.load_checkpoint(work / "checkpoint")
    actor.update([batch], objective, TEMPERATURE)
    return [*went_on, reference(actor), own(actor)]


@pytest.mark.parametrize(
    ("layout", "distributed"),
    [
        pytest.param({}, False, id="one", marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, False, id="TP2", marks=pytest.mark.slow),
        pytest.param({"data": 2}, True, id="DP2"),
    ],
)
def test_a_reset_makes_the_present_weights_the_reference_and_can_be_resumed(gloo, layout, distributed, tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3", tied=True)
    ranks = int(np.prod([*layout.values(), 1]))
    before, renewed, later, trained, loaded, again = gloo(ranks, reset, folder, layout, distributed, tmp_path)[0]
    np.testing.assert_array_equal(renewed.log_probs, before.log_probs)
    np.testing.assert_array_equal(later.log_probs, before.log_probs)
    assert np.abs(trained.log_probs - before.log_probs).max() > 1e-3
    np.testing.assert_array_equal(loaded.log_probs, before.log_probs)
    np.testing.assert_array_equal(again.log_probs, trained.log_probs)


def first_update(place: RankPlace, folder: Path, model: Path, steps: int, forget: bool) -> Any:
    """Log-probs after one update of the weights in `folder`, by an optimizer that made `steps` before it."""
    config, data = actor_config(optimizer={"lr": 1e-3}), columns(model)
    batch = mini_batch(data, config, without=("reference_log_probs", "correction"))
    actor = start_actor(place, folder, config, keep_reference=True)
    actor.update([batch] * steps, PolicyObjective(), TEMPERATURE)
    if forget:
        actor.export_hf(folder.with_name("later"))
        actor.reset_reference(optimizer=True)
    actor.update([batch], PolicyObjective(), TEMPERATURE)
    return actor.log_probs(data.responses, batch.plan, TEMPERATURE)


def test_after_a_reset_adamw_steps_as_it_does_from_the_same_weights_anew(gloo, tmp_path):
    model = save_tiny(tmp_path / "model", "qwen3", tied=True)
    gone_on = gloo(1, first_update, model, model, 2, True)[0]
    anew = gloo(1, first_update, tmp_path / "later", model, 0, False)[0]
    np.testing.assert_allclose(gone_on.log_probs, anew.log_probs, rtol=0, atol=1e-6)
    kept = gloo(1, first_update, model, model, 3, False)[0]
    assert np.abs(kept.log_probs - anew.log_probs).max() > 1e-4
