"""Which groups are kept, and how many more prompts are sent."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithm.dynamic_sampling import PassRate, keep_group, prompts_to_dispatch
from megatron_dapo.config.algorithm_config import DynamicSamplingConfig


def test_only_mixed_groups_are_kept():
    assert [keep_group(correct, 4) for correct in range(5)] == [False, True, True, True, False]
    assert [keep_group(correct, 2) for correct in range(3)] == [False, True, False]


@given(st.integers(0, 600), st.integers(0, 600), st.integers(1, 1000))
def test_dispatch_is_the_smallest_number_whose_expectation_suffices(missing, in_flight, thousandths):
    rate = Fraction(thousandths, 1000)
    more = prompts_to_dispatch(missing, in_flight, thousandths / 1000)
    assert more >= 0
    if missing > 0:
        assert (in_flight + more) * rate >= missing
        assert more == 0 or (in_flight + more - 1) * rate < missing
    else:
        assert more == 0


def test_the_example_of_the_docstring():
    assert prompts_to_dispatch(8, 4, 0.5) == 12


@pytest.mark.parametrize(("margin", "enough"), [(0.0, 0.5), (1.0, 0.841), (2.0, 0.977)])
def test_a_margin_is_enough_as_often_as_the_normal_distribution_says(margin, enough):
    number = prompts_to_dispatch(512, 0, 0.72, margin)
    kept = np.random.default_rng(0).binomial(number, 0.72, 20_000)
    assert (kept >= 512).mean() == pytest.approx(enough, abs=0.05)


@given(st.integers(1, 600), st.integers(0, 600), st.floats(0.01, 1.0), st.floats(0.0, 4.0))
def test_with_a_margin_it_is_the_smallest_number_too(missing, in_flight, rate, margin):
    def falls_short(number):
        return number * rate - margin * math.sqrt(number * rate * (1 - rate)) - missing

    more = prompts_to_dispatch(missing, in_flight, rate, margin)
    assert falls_short(in_flight + more) >= -1e-6
    assert more == 0 or falls_short(in_flight + more - 1) < 1e-6


def test_rounding_of_the_quotient_sends_no_extra_prompt():
    assert math.ceil(9 / 0.009) == 1001  # what a plain ceil would say
    assert prompts_to_dispatch(9, 0, 0.009) == 1000


def test_pass_rate_is_the_mean_of_the_posterior():
    estimate = PassRate.start(0.5, memory=1e9)
    assert estimate.mean == 0.5
    assert estimate.update(kept=6, filtered=0).mean == pytest.approx(8 / 10)
    assert estimate.update(kept=1, filtered=2).update(kept=5, filtered=4).mean == pytest.approx(8 / 16)
    assert estimate.mean == 0.5  # the update made a new one


def test_pass_rate_follows_a_drift():
    estimate = PassRate.start(0.5, memory=100.0)
    for _ in range(50):
        estimate = estimate.update(kept=9, filtered=1)
    assert estimate.mean == pytest.approx(0.9, abs=0.02)
    for _ in range(50):
        estimate = estimate.update(kept=2, filtered=8)
    assert estimate.mean == pytest.approx(0.2, abs=0.03)


def test_pass_rate_never_reaches_zero():
    estimate = PassRate.start(0.01)
    for _ in range(100):
        estimate = estimate.update(kept=0, filtered=512)
    assert 0 < estimate.mean < 0.001
    assert prompts_to_dispatch(1, 0, estimate.mean) > 1000


def test_pass_rate_forgets_as_the_formula_says():
    start = PassRate(prior_kept=1.0, prior_filtered=0.0, memory=2.0)
    estimate = start.update(kept=2, filtered=0).update(kept=0, filtered=1)
    assert estimate.mean == pytest.approx((1 + 2 * 0.5) / (1 + 2 * 0.5 + 1))


RATES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def surpluses(rate: float, seed: int, *, surplus: float, wanted: int = 512, batches: int = 4) -> list[float]:
    """Prompts of each batch sent beyond those it needed, in standard deviations of what a batch needs: the sampler's
    rule, asked after each decision."""
    random, estimate = np.random.default_rng(seed), PassRate.start(0.5, memory=4.0 * wanted)
    deviation = math.sqrt(wanted * (1 - rate)) / rate
    found = []
    for _ in range(batches):
        kept = decided = sent = 0
        while kept < wanted:
            sent += estimate.prompts_to_send(wanted - kept, sent - decided, surplus)
            useful = bool(random.random() < rate)
            kept, decided = kept + useful, decided + 1
            estimate = estimate.update(kept=int(useful), filtered=int(not useful))
        found.append((sent - decided) / deviation)
    return found


@pytest.mark.parametrize("rate", RATES)
def test_no_batch_sends_more_than_two_standard_deviations_beyond_its_need(rate):
    """Also the first, which has measured nothing. At the mean (surplus 0) the first sends a multiple."""
    surplus = DynamicSamplingConfig().surplus
    assert max(max(surpluses(rate, seed, surplus=surplus)) for seed in range(20)) <= 2.0
    assert max(surpluses(rate, seed, surplus=0.0, batches=1)[0] for seed in range(5)) > 5.0


def test_the_upper_bound_is_that_of_the_docstring():
    start = PassRate.start(0.5)
    assert start.upper(2.0) == 1.0
    some = replace(start, kept=300.0, filtered=300.0)
    assert some.upper(2.0) == pytest.approx(0.5 + 2 * (1 + math.sqrt(math.log(2048 / 604) / 2)) * math.sqrt(0.25 / 605))
    assert some.upper(2.0) == pytest.approx(0.57, abs=0.005)
    assert replace(start, kept=1024.0, filtered=1024.0).upper(2.0) == pytest.approx(0.52, abs=0.005)
    assert some.upper(0.0) == some.mean
