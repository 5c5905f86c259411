"""Reflecting and backtracking words, and their correlation with success, against numpy's own."""

import numpy as np
import pytest

from megatron_dapo.monitor.reflection import BACKTRACKING, REFLECTION, correlation, wording_metrics


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
    metrics = wording_metrics(["wait", "wait", "4", "start over"], [True, False, True, False])
    assert metrics == {
        "reflection_rate": 0.5,
        "reflection_accuracy": 0.5,
        "backtracking_rate": 0.25,
        "backtracking_accuracy": 0.0,
    }
    assert "reflection_accuracy" not in wording_metrics(["4"], [True])


def test_one_step_gives_the_correlation_of_its_responses():
    random = np.random.default_rng(0)
    has = random.random(500) < 0.3
    right = random.random(500) < np.where(has, 0.7, 0.4)
    expected = np.corrcoef(has, right)[0, 1]
    assert correlation([has.mean()], [right[has].mean()], [right.mean()]) == pytest.approx(expected)


def test_a_common_rise_over_the_steps_is_no_correlation():
    assert correlation([0.1, 0.9], [0.2, 0.8], [0.2, 0.8]) == pytest.approx(0)


def test_words_that_never_come_have_no_correlation():
    assert correlation([0.0], [0.0], [0.5]) is None
