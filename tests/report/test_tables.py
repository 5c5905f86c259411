"""Figures of the report's tables, worked out by hand or by numpy."""

import numpy as np
import pytest

from megatron_dapo.report import tables
from megatron_dapo.report.source import Run
from megatron_dapo.report.tables import correlation
from tests.report.folders import write_lines, write_run


def test_the_accuracy_of_reflecting_responses_is_over_all_of_them(tmp_path):
    """By hand: of 10 groups 20% reflect, half of those right; of 90 groups 40%, none right, nor any other response."""
    steps = [(10, 0.2, 0.5, 0.3), (90, 0.4, 0.0, 0.0)]
    folder = write_run(tmp_path / "run")
    lines = [
        {
            "rollout_step": at,
            "optimizer_step": at,
            "sampling/generated": groups,
            "reflection_rate": rate,
            "reflection_accuracy": among,
            "accuracy/mean": accuracy,
        }
        for at, (groups, rate, among, accuracy) in enumerate(steps, start=1)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    [[name, share, right, _]] = tables.reflection_rows(Run(folder))
    assert (name, share) == ("reflection", "38.0%")  # (10 x 0.2 + 90 x 0.4) / 100
    assert right == "2.6%"  # 10 x 0.2 x 0.5 of those 38


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
