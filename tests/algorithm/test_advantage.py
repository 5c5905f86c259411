"""Eq. 9 against plain Python on floats."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dapo.algorithm.advantage import group_advantages, standardized, step_advantages

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


def papers_formula(rewards: list[list[float]], lengths: list[int], estimator: str) -> list[float]:
    """Straight from the papers' texts, with population or sample deviation as `statistics` has them; ddof 1."""
    flat = [r for group in rewards for r in group]
    centred = [r - statistics.fmean(group) for group in rewards for r in group]
    if estimator == "no_std":
        return centred
    if estimator == "group_std":
        return [(r - statistics.fmean(g)) / (statistics.stdev(g) + EPSILON) for g in rewards for r in g]
    if estimator == "rloo":
        return [r - (sum(g) - r) / (len(g) - 1) for g in rewards for r in g]
    if estimator == "batch_std":
        return [d / (statistics.stdev(centred) + EPSILON) for d in centred]
    tokens = [d for d, length in zip(centred, lengths, strict=True) for _ in range(length)]
    assert len(flat) == len(lengths)
    return [(d - statistics.fmean(tokens)) / (statistics.stdev(tokens) + EPSILON) for d in centred]


@pytest.mark.parametrize("estimator", ["group_std", "no_std", "rloo", "batch_std", "reinforce_pp_baseline"])
def test_each_estimator_is_its_papers_formula(estimator):
    rewards = [[1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 0.5, -1.5], [1.0, -1.0, 1.0, -1.2]]
    lengths = [7, 3, 9, 1, 2, 2, 8, 30, 4, 5, 6, 1]
    got = step_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(lengths),
        epsilon=EPSILON,
        ddof=1,
        estimator=estimator,
    )
    assert got.tolist() == pytest.approx(papers_formula(rewards, lengths, estimator), rel=1e-12)


def test_a_group_without_spread_is_zero_in_every_estimator_but_it_counts_in_the_batchs_deviation():
    rewards = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    given = {"epsilon": 0.0, "ddof": 0}
    for estimator in ("group_std", "no_std", "rloo", "batch_std"):
        assert step_advantages(rewards, torch.ones(4, dtype=torch.int64), estimator=estimator, **given)[:2].eq(0).all()
    alone = step_advantages(rewards[1:], torch.ones(2, dtype=torch.int64), estimator="batch_std", **given)
    both = step_advantages(rewards, torch.ones(4, dtype=torch.int64), estimator="batch_std", **given)
    assert (alone.tolist(), both[2:].tolist()) == ([1.0, -1.0], pytest.approx([math.sqrt(2), -math.sqrt(2)]))


def test_equal_deviations_are_standardized_to_zero():
    assert standardized(torch.full((3,), 0.1), epsilon=1e-12, ddof=1).tolist() == [0, 0, 0]
    assert standardized(torch.zeros(0), epsilon=1e-12, ddof=1).shape == (0,)
