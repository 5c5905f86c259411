"""Reflecting and backtracking words of responses."""

import pytest

from megatron_dapo.coordinator.step_metrics import BACKTRACKING, REFLECTION, reflection_metrics


@pytest.mark.parametrize(
    ("text", "reflects", "backtracks"),
    [
        ("Wait, 3*4 is 12", True, False),
        ("let me verify this", True, False),
        ("That is wrong. Start over", False, True),
        ("I made a mistake", True, True),
        ("the waiter came", False, False),
        ("12", False, False),
    ],
)
def test_words(text, reflects, backtracks):
    assert bool(REFLECTION.search(text)) == reflects
    assert bool(BACKTRACKING.search(text)) == backtracks


def test_shares_and_accuracy():
    metrics = reflection_metrics(["wait", "wait", "4", "start over"], [True, False, True, False])
    assert metrics == {
        "reflection_rate": 0.5,
        "reflection_accuracy": 0.5,
        "backtracking_rate": 0.25,
        "backtracking_accuracy": 0.0,
    }
    assert "reflection_accuracy" not in reflection_metrics(["4"], [True])
