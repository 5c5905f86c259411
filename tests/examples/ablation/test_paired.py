"""The statistics against tables and sums done by hand."""

import math
import statistics

import pytest

from examples.ablation.paired import holm, paired, t_quantile, t_within

TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042}
"""97.5% points of Student's t, as every textbook prints them."""


@pytest.mark.parametrize(("freedom", "point"), TABLE.items())
def test_quantiles_are_those_of_the_table(freedom: int, point: float) -> None:
    assert t_quantile(freedom) == pytest.approx(point, abs=6e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 8.0])
def test_the_series_is_the_integral_of_the_density(freedom: int, t: float) -> None:
    """Simpson's rule on the density itself."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_scale) / math.sqrt(freedom * math.pi)
    steps = 4000
    values = [scale * (1 + (t * at / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) for at in range(steps + 1)]
    half = (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])) * t / steps / 3
    assert t_within(t, freedom) == pytest.approx(2 * half, abs=1e-9)


def test_an_interval_by_hand() -> None:
    """Differences 1, 2, 3, 4, 5: mean 3, deviation sqrt(2.5), standard error sqrt(0.5), 4 degrees of freedom."""
    found = paired([1, 2, 3, 4, 5])
    half = 2.7764451 * math.sqrt(0.5)
    assert (found.mean, found.n) == (3, 5)
    assert found.low == pytest.approx(3 - half, abs=1e-6)
    assert found.high == pytest.approx(3 + half, abs=1e-6)
    assert found.p == pytest.approx(0.0132, abs=5e-5), "t = 3 / sqrt(0.5) = 4.243"
    assert found.excludes_zero


def test_the_interval_and_the_probability_agree_about_zero() -> None:
    for shift in (-2.0, -1.0, 0.0, 0.7, 1.95, 1.97, 3.0):
        found = paired([shift + value for value in (-1.5, -0.5, 0.0, 0.5, 1.5)])
        assert found.low is not None
        assert found.high is not None
        assert found.excludes_zero == (found.low > 0 or found.high < 0)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    chance = statistics.NormalDist(1.0, 2.0)
    covered = 0
    for seed in range(400):
        found = paired(chance.samples(5, seed=seed))
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.0 <= found.high
    assert 0.92 < covered / 400 < 0.98


def test_one_seed_has_no_interval_and_none_is_an_error() -> None:
    alone = paired([4.0])
    assert (alone.mean, alone.low, alone.high, alone.p) == (4.0, None, None, None)
    assert not alone.excludes_zero
    with pytest.raises(ValueError, match="no pair of runs"):
        paired([])


def test_equal_differences_are_sure_unless_they_are_zero() -> None:
    assert paired([2.0, 2.0]).p == 0
    assert paired([0.0, 0.0]).p == 1


def test_holm_by_hand() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
