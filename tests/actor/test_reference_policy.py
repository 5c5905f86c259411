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


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"data": 2}], ids=str)
def test_the_reference_stays_and_training_does_not_notice(gloo, layout, tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen3", tied=True)
    ranks = int(np.prod([*layout.values(), 1]))
    start, first, second, trained = gloo(ranks, run, folder, layout, True)[0]
    np.testing.assert_array_equal(first.log_probs, start.log_probs)
    np.testing.assert_array_equal(second.log_probs, start.log_probs)
    assert np.abs(trained.log_probs - start.log_probs).max() > 1e-3
    undisturbed = gloo(ranks, run, folder, layout, False)[0][-1]
    np.testing.assert_array_equal(trained.log_probs, undisturbed.log_probs)
