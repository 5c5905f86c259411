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
            inside = weight if LOWER <= weight <= UPPER else 0.0
            weights.append(min(weight, UPPER) if mode == "truncated" else inside)
    return weights


def correct(gaps: list[list[float]], mode: str, level: str):
    old = torch.tensor([gap - 3.0 for response in gaps for gap in response], dtype=torch.float64)
    rollout = torch.full_like(old, -3.0)
    lengths = torch.tensor([len(response) for response in gaps], dtype=torch.int64)
    return correction_weights(old, rollout, mode=mode, level=level, upper=UPPER, lower=LOWER, response_lengths=lengths)


@pytest.mark.parametrize("mode", ["truncated", "masked"])
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


def test_tokens_of_several_versions_are_weighted_by_the_version_that_drew_each():
    """A response that a publish interrupted: its first token was drawn by older weights than its second. Over every
    response of two tokens, the weighted mean under the mixed behaviour is the mean under the trainer's policy."""
    generator = torch.Generator().manual_seed(0)
    words = 3

    def policy() -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the first token, [words], and of the second given the first, [words, words]."""
        first, second = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (words, (words,) * 2)
        )
        return first.log_softmax(-1), second.log_softmax(-1)

    older, newer, trainer = policy(), policy(), policy()
    reward = torch.randn((words, words), generator=generator, dtype=torch.float64)
    responses = [(a, b) for a in range(words) for b in range(words)]
    rollout = torch.stack([value for a, b in responses for value in (older[0][a], newer[1][a, b])])
    old = torch.stack([value for a, b in responses for value in (trainer[0][a], trainer[1][a, b])])
    lengths = torch.full((len(responses),), 2)
    got = correction_weights(
        old, rollout, mode="truncated", level="sequence", upper=1e6, lower=0.0, response_lengths=lengths
    )
    weights = got.weights.view(-1, 2)
    assert torch.equal(weights[:, 0], weights[:, 1]), "every token has its response's weight"
    drawn = rollout.view(-1, 2).sum(-1).exp()
    assert drawn.sum().item() == pytest.approx(1.0, abs=1e-12)
    flat = torch.stack([reward[a, b] for a, b in responses])
    expected = (old.view(-1, 2).sum(-1).exp() * flat).sum()
    assert (drawn * weights[:, 0] * flat).sum().item() == pytest.approx(expected.item(), rel=1e-12)
    wrong = (drawn * flat).sum()
    assert abs(wrong - expected) > 0.01, "without the weights it is another mean: the test can fail"
    token = correction_weights(
        old, rollout, mode="masked", level="token", upper=UPPER, lower=LOWER, response_lengths=lengths
    )
    ratios = [math.exp(new - was) for new, was in zip(old.tolist(), rollout.tolist(), strict=True)]
    assert token.weights.tolist() == pytest.approx([r if LOWER <= r <= UPPER else 0.0 for r in ratios], rel=1e-12)
