"""Eq. 7 and eq. 13 against plain Python, at the numbers of the paper."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithm.overlong import (
    linear_penalty,
    raw_reward,
    shaped_rewards,
    soft_overlong_penalty,
)


def equation_13(length: int, max_length: int, cache: int) -> float:
    if length <= max_length - cache:
        return 0.0
    if length <= max_length:
        return ((max_length - cache) - length) / cache
    return -1.0


@given(st.integers(1, 40000), st.integers(1, 30000), st.floats(0.1, 3))
def test_soft_penalty_equals_equation_13(length, buffer, factor):
    max_length = 30000
    got = soft_overlong_penalty(torch.tensor([length]), max_length=max_length, buffer=buffer, factor=factor)
    assert got.item() == pytest.approx(factor * equation_13(length, max_length, buffer), abs=1e-12)


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1)]
)
def test_soft_penalty_at_the_papers_lengths(length, penalty):
    assert soft_overlong_penalty(torch.tensor([length]), max_length=20480, buffer=4096).item() == penalty


@given(st.integers(0, 5000), st.integers(1, 2000), st.floats(0.1, 3))
def test_linear_penalty(length, start, factor):
    got = linear_penalty(torch.tensor([length]), start=start, factor=factor)
    assert got.item() == pytest.approx(-factor * max(0, length - start) / start, abs=1e-12)


def test_raw_reward():
    assert raw_reward(torch.tensor([True, False])).tolist() == [1.0, -1.0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("none", [1.0, -1.0, -1.0]), ("soft", [1.0, -1.5, -2.0]), ("linear", [1.0, -1 - 0.5 / 8, -1 - 1 / 8])],
)
def test_shaped_rewards(shape, expected):
    accuracy, lengths = torch.tensor([True, False, False]), torch.tensor([16384, 17408, 18432])
    got = shaped_rewards(raw_reward(accuracy), lengths, shape=shape, max_length=18432, buffer=2048, factor=1.0)
    assert got.tolist() == pytest.approx(expected)


@given(st.booleans(), st.integers(1, 20480))
def test_the_soft_shaped_reward_is_in_the_papers_range(right, length):
    reward, lengths = raw_reward(torch.tensor([right])), torch.tensor([length])
    got = shaped_rewards(reward, lengths, shape="soft", max_length=20480, buffer=4096)
    assert -2 <= got.item() <= 1
    assert (got.item() > -1) or not right or length == 20480


def test_rewards_keep_the_shape_of_groups():
    accuracy, lengths = torch.tensor([[True, False], [False, False]]), torch.tensor([[5, 10], [8, 9]])
    got = shaped_rewards(raw_reward(accuracy), lengths, shape="soft", max_length=10, buffer=5)
    assert got.tolist() == [[1.0, -2.0], [pytest.approx(-1.6), pytest.approx(-1.8)]]
    assert got.dtype == torch.float64
