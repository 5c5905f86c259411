"""Intervals against their definition, and against what they promise: 95% coverage, by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.monitor.statistics import Accuracy, clustered_accuracy, difference
from tests.monitor.runs import wilson_accuracy

Z = 1.959963984540054


def wilson_by_bisection(share: float, n: float, sign: int) -> float:
    """The p on one side of `share` where |share - p| = z sqrt(p (1 - p) / n)."""
    inside, outside = share, float(sign > 0)
    for _ in range(200):
        middle = (inside + outside) / 2
        if abs(share - middle) <= Z * math.sqrt(middle * (1 - middle) / n):
            inside = middle
        else:
            outside = middle
    return inside


@settings(deadline=None)
@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_solves_its_equation(pair):
    correct, n = pair
    got = wilson_accuracy(correct, n)
    assert got.accuracy == correct / n
    assert got.low == pytest.approx(wilson_by_bisection(correct / n, n, -1), abs=1e-9)
    assert got.high == pytest.approx(wilson_by_bisection(correct / n, n, +1), abs=1e-9)
    assert (got.n, got.problems) == (n, n)


def test_the_example_of_the_docstring():
    got = wilson_accuracy(848, 1000)
    assert (round(100 * got.low, 1), round(100 * got.high, 1)) == (82.4, 86.9)


def test_one_answer_a_problem_is_nearly_wilson():
    answers = np.arange(400)[:, None] < 120
    got, plain = clustered_accuracy(answers), wilson_accuracy(120, 400)
    assert (got.accuracy, got.n, got.problems) == (plain.accuracy, 400, 400)
    assert (got.low, got.high) == pytest.approx((plain.low, plain.high), abs=1e-3)


def test_answers_that_are_copies_count_once():
    once = np.arange(100)[:, None] < 40
    got, plain = clustered_accuracy(np.repeat(once, 8, axis=1)), clustered_accuracy(once)
    assert (got.low, got.high) == pytest.approx((plain.low, plain.high), abs=1e-12)
    assert (got.n, got.problems) == (800, 100)


def test_answers_without_likeness_count_each():
    answers = np.random.default_rng(0).random((2000, 8)) < 0.4
    got, plain = clustered_accuracy(answers), wilson_accuracy(int(answers.sum()), answers.size)
    assert got.high - got.low == pytest.approx(plain.high - plain.low, rel=0.05)


def test_the_clustered_interval_keeps_its_promise():
    """30 problems of differing difficulty, 8 answers each, many times: the truth lies inside about 95% of the time."""
    random = np.random.default_rng(1)
    trials, inside, inside_naive = 2000, 0, 0
    for _ in range(trials):
        difficulty = random.beta(1.0, 1.5, size=(30, 1))  # mean 0.4
        answers = random.random((30, 8)) < difficulty
        got, naive = clustered_accuracy(answers), wilson_accuracy(int(answers.sum()), answers.size)
        inside += got.low <= 0.4 <= got.high
        inside_naive += naive.low <= 0.4 <= naive.high
    assert 0.925 <= inside / trials <= 0.975
    assert inside_naive / trials < 0.8  # what the clustering is for


@pytest.mark.parametrize("right", [True, False])
def test_all_right_or_all_wrong_is_no_certainty(right):
    got = clustered_accuracy(np.full((30, 8), right))
    assert got.accuracy == float(right)
    assert 0.05 < got.high - got.low < 0.2


def test_one_problem():
    got = clustered_accuracy(np.array([[True, False, True, True]]))
    assert got.accuracy == 0.75
    assert got.high - got.low > 0.7


def test_difference_of_newcombe():
    # Newcombe 1998, table II, method 10: 56/70 - 48/80 has the interval 0.0524 to 0.3339.
    got = difference(wilson_accuracy(48, 80), wilson_accuracy(56, 70))
    assert got.value == pytest.approx(0.2)
    assert (got.low, got.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_difference_keeps_its_promise():
    random = np.random.default_rng(2)
    counts = random.binomial(200, [0.3, 0.8], size=(2000, 2))
    gains = [difference(wilson_accuracy(int(a), 200), wilson_accuracy(int(b), 200)) for a, b in counts]
    inside = np.mean([gain.low <= 0.5 <= gain.high for gain in gains])
    assert 0.93 <= inside <= 0.97


def test_accuracy_goes_through_json_and_back():
    from dataclasses import asdict

    got = wilson_accuracy(3, 7)
    assert Accuracy(**asdict(got)) == got
