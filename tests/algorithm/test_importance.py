"""Importance correction and mismatch against plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithm.importance import correction_weights, mismatch

UPPER, LOWER = 2.0, 0.5


def reference(gaps: list[list[float]], mode: str, level: str) -> list[float]:
    weights = []
    for response in gaps:
        for gap in response:
            weight = math.exp(sum(response) if level == "sequence" else gap)
            if mode == "truncated":
                weight = min(weight, UPPER)
            elif mode == "masked":
                weight = weight if LOWER <= weight <= UPPER else 0.0
            else:
                weight = 1.0
            weights.append(weight)
    return weights


def correct(gaps: list[list[float]], mode: str, level: str):
    old = torch.tensor([gap - 3.0 for response in gaps for gap in response], dtype=torch.float64)
    rollout = torch.full_like(old, -3.0)
    lengths = torch.tensor([len(response) for response in gaps], dtype=torch.int64)
    return correction_weights(old, rollout, mode=mode, level=level, upper=UPPER, lower=LOWER, response_lengths=lengths)


@pytest.mark.parametrize("mode", ["none", "truncated", "masked"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@given(gaps=st.lists(st.lists(st.floats(-2, 2), max_size=4), max_size=5))
def test_weights(mode, level, gaps):
    expected = reference(gaps, mode, level)
    got = correct(gaps, mode, level)
    near_a_bound = [min(abs(math.log(w / b)) for b in (UPPER, LOWER)) < 1e-9 for w in expected if w > 0]
    if not any(near_a_bound) or mode == "truncated":
        assert got.weights.tolist() == pytest.approx(expected, rel=1e-9)


def test_shares():
    gaps = [[1.0, 0.0], [-1.0], [0.1]]
    token = correct(gaps, "truncated", "token")
    assert (token.truncated_share, token.masked_share) == (0.25, 0.0)
    token = correct(gaps, "masked", "token")
    assert (token.truncated_share, token.masked_share) == (0.0, 0.5)
    whole = correct(gaps, "masked", "sequence")
    assert whole.weights.tolist() == pytest.approx([0.0, 0.0, 0.0, math.exp(0.1)])
    assert whole.masked_share == 0.75


def test_weights_carry_no_gradient():
    old = torch.zeros(2, requires_grad=True)
    got = correction_weights(
        old,
        torch.tensor([-0.1, 0.1]),
        mode="truncated",
        level="token",
        upper=UPPER,
        lower=LOWER,
        response_lengths=torch.tensor([2]),
    )
    assert not got.weights.requires_grad


@pytest.mark.parametrize("mode", ["truncated", "masked"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_float32_stays_finite_at_extreme_gaps(mode, level):
    old = torch.tensor([500.0, 500.0, -500.0, 0.0])
    got = correction_weights(
        old,
        torch.zeros(4),
        mode=mode,
        level=level,
        upper=UPPER,
        lower=LOWER,
        response_lengths=torch.tensor([2, 1, 1]),
    )
    assert got.weights.isfinite().all()
    assert got.weights.tolist() == ([2.0, 2.0, 0.0, 1.0] if mode == "truncated" else [0.0, 0.0, 0.0, 1.0])


def test_mismatch():
    old, rollout = torch.tensor([-1.0, -2.0, -0.5]).double(), torch.tensor([-1.1, -1.5, -0.5]).double()
    gaps = [0.1, -0.5, 0.0]
    got = mismatch(old, rollout)
    assert got.kl == pytest.approx(sum(math.exp(gap) - 1 - gap for gap in gaps) / 3)
    assert got.max_abs == pytest.approx(0.5)
    assert got.mean_abs == pytest.approx(0.2)


def test_mismatch_of_nothing():
    assert mismatch(torch.zeros(0), torch.zeros(0)).max_abs == 0.0
