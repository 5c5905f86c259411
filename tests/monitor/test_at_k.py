"""avg@k, pass@k, cons@k against counting every subset, and intervals against known ones."""

from itertools import combinations

import numpy as np
import pytest

from megatron_dapo.monitor.statistics import consensus, mean_with_interval, pass_at_k, sizes
from tests.monitor.runs import wilson_accuracy


@pytest.mark.parametrize("n", [1, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for correct in range(n + 1):
        answers = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = list(combinations(answers, k))
            assert pass_at_k(correct, n, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_exact_where_factorials_would_overflow():
    assert pass_at_k(1, 4096, 1024) == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize(
    ("votes", "correct", "expected"),
    [
        ("aab", (1, 1, 0), 1.0),
        ("abb", (1, 0, 0), 0.0),
        ("ab", (1, 0), 0.5),  # a tie of two
        ("abc", (0, 1, 0), 1 / 3),  # a tie of three
        ("xyb", (1, 1, 0), 1.0),  # right answers written in two ways are one candidate
        ([None, None, "a"], (0, 0, 1), 1.0),  # no answer is no vote
        ([None, None], (0, 0), 0.0),
        ([None, "a"], (0, 0), 0.0),
    ],
)
def test_consensus(votes, correct, expected):
    assert consensus(list(votes), [bool(each) for each in correct]) == pytest.approx(expected)


def test_the_interval_of_many_problems_is_the_normal_one():
    values = np.random.default_rng(3).beta(2, 3, 400)
    estimate = mean_with_interval(values, 32)
    half = 1.96 * values.std(ddof=1) / 20
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.low == pytest.approx(values.mean() - half, abs=half / 10)
    assert estimate.high == pytest.approx(values.mean() + half, abs=half / 10)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(60):
        estimate = mean_with_interval(random.beta(2, 2, 50), 32)
        covered += estimate.low <= 0.5 <= estimate.high
    assert covered >= 51  # 95 % of 60 is 57; fewer than 51 happens once in 500 times


def test_without_spread_wilson_stands_in():
    for values, right in ((np.ones(30), 30), (np.zeros(30), 0), (np.full(30, 0.5), 15), (np.full(30, 0.3), 9)):
        estimate, wilson = mean_with_interval(values, 8), wilson_accuracy(right, 30)
        assert (estimate.low, estimate.high) == pytest.approx((wilson.low, wilson.high), abs=1e-12)


def test_sizes():
    assert sizes(1) == [1]
    assert sizes(32) == [1, 2, 4, 8, 16, 32]
    assert sizes(6) == [1, 2, 4, 6]
