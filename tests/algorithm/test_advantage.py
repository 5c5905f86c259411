"""Eq. 9 against plain Python on floats."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithm.advantage import group_advantages

EPSILON = 1e-6


def reference(rewards: list[float], epsilon: float, ddof: int) -> list[float]:
    spread = statistics.stdev(rewards) if ddof else statistics.pstdev(rewards)
    return [(reward - statistics.fmean(rewards)) / (spread + epsilon) for reward in rewards]


def advantages(rewards: list[list[float]], ddof: int = 1) -> torch.Tensor:
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), epsilon=EPSILON, ddof=ddof)


groups = st.lists(st.floats(-2, 1), min_size=2, max_size=16).filter(lambda rewards: max(rewards) - min(rewards) > 1e-3)


@given(groups, st.sampled_from([0, 1]))
def test_equals_the_formula(rewards, ddof):
    assert advantages([rewards], ddof)[0].tolist() == pytest.approx(
        reference(rewards, EPSILON, ddof), rel=1e-9, abs=1e-9
    )


def test_the_example_of_the_docstring():
    result = group_advantages(torch.tensor([[1.0, -1, -1, -1]], dtype=torch.float64), epsilon=0.0, ddof=1)
    assert result[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-12)


def test_groups_do_not_see_each_other():
    together = advantages([[1, -1, -1, -1], [1, 1, -1.5, -2]])
    assert together[0].tolist() == advantages([[1, -1, -1, -1]])[0].tolist()
    assert together[1].tolist() == advantages([[1, 1, -1.5, -2]])[0].tolist()


@given(groups, st.randoms())
def test_follows_a_permutation_of_the_group(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = advantages([[rewards[i] for i in order]])[0]
    assert shuffled.tolist() == pytest.approx(advantages([rewards])[0][order].tolist(), abs=1e-9)


@given(st.floats(-2, 1, width=32), st.integers(2, 16), st.sampled_from([torch.float32, torch.float64]))
def test_no_spread_gives_exactly_zero(reward, size, dtype):
    # 0.1 summed 10 times is not 1.0: without the special case, rounding / epsilon would be an advantage.
    result = group_advantages(torch.full((1, size), reward, dtype=dtype), epsilon=1e-12, ddof=1)
    assert result.tolist() == [[0.0] * size]
    assert result.dtype == dtype


def test_group_of_two():
    assert advantages([[1, -1]])[0].tolist() == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)], rel=1e-5)
    assert advantages([[1, -1]], ddof=0)[0].tolist() == pytest.approx([1, -1], rel=1e-5)


def test_a_reward_that_is_not_a_number_is_not_hidden():
    assert advantages([[1.0, math.nan, -1.0]]).isnan().any()


def test_no_prompts():
    assert group_advantages(torch.zeros(0, 4), epsilon=EPSILON, ddof=1).shape == (0, 4)
