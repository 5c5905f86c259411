"""Eq. 8 against plain Python, its gradient against numeric differentiation in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from examples.quickstart.supervised import SupervisedObjective
from megatron_dapo.algorithm.losses.clipped import Clipped, clipped_surrogate
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.algorithm.token_loss import LossColumns, importance_ratio

LOW, HIGH, DUAL = 0.2, 0.28, 10.0


def equation_8(ratio: float, advantage: float, dual: float | None = None) -> float:
    """Negated summand of eq. 8, with the cases written out."""
    if advantage >= 0:
        return -(1 + HIGH if ratio > 1 + HIGH else ratio) * advantage
    effective = max(ratio, 1 - LOW)
    if dual is not None:
        effective = min(effective, dual)
    return -effective * advantage


def surrogate(ratios: list[float], advantages: list[float], dual: float | None = None) -> torch.Tensor:
    ratios, advantages = torch.tensor(ratios, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)
    old = torch.full_like(ratios, -1.5)
    return clipped_surrogate(importance_ratio(old + ratios.log(), old), advantages, low=LOW, high=HIGH, dual=dual)


@given(st.floats(1e-4, 100), st.floats(-4, 4), st.sampled_from([None, DUAL]))
def test_equals_equation_8(ratio, advantage, dual):
    assert surrogate([ratio], [advantage], dual).item() == pytest.approx(equation_8(ratio, advantage, dual), rel=1e-9)


def test_the_example_of_the_docstring():
    got = surrogate([1.2, 1.5, 0.5, 0.9, 0.5, 30.0], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    assert got.tolist() == pytest.approx([-1.2, -1.28, -0.5, 0.9, 0.8, 30.0])
    assert surrogate([30.0], [-1.0], DUAL).item() == pytest.approx(10.0)


# One ratio in every branch: below, inside, above the range, and beyond the dual clip; none at a kink.
BRANCHES = [(ratio, advantage) for ratio in (0.5, 0.95, 1.1, 1.5, 20.0) for advantage in (1.3, -0.7, 0.0)]


@pytest.mark.parametrize("dual", [None, DUAL])
def test_gradient_is_the_numeric_one_in_every_branch(dual):
    ratios = torch.tensor([ratio for ratio, _ in BRANCHES], dtype=torch.float64)
    advantages = torch.tensor([advantage for _, advantage in BRANCHES], dtype=torch.float64)
    old = torch.linspace(-3, -0.1, len(BRANCHES), dtype=torch.float64)
    log_probs = (old + ratios.log()).requires_grad_()
    assert gradcheck(
        lambda x: clipped_surrogate(importance_ratio(x, old), advantages, low=LOW, high=HIGH, dual=dual),
        (log_probs,),
        eps=1e-7,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 1.0, -1.0),  # first update: minus the policy gradient
        (1.2, 2.0, -2.4),
        (1.5, 1.0, 0.0),  # above the range, would go further up: cut
        (1.5, -1.0, 1.5),  # above the range, on the way back: free
        (0.5, -1.0, 0.0),  # below the range, would go further down: cut
        (0.5, 1.0, -0.5),
        (20.0, -1.0, 0.0),  # dual clip
        (1.28, 1.0, -1.28),  # on the edge the gradient is whole
    ],
)
def test_where_the_gradient_is_cut(ratio, advantage, slope):
    log_probs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    ratio = importance_ratio(log_probs, old)
    clipped_surrogate(ratio, advantages, low=LOW, high=HIGH, dual=DUAL).sum().backward()
    assert log_probs.grad.item() == pytest.approx(slope, rel=1e-12)


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
@pytest.mark.parametrize("gap", [-1e4, -100.0, -30.0, 30.0, 100.0, 1e4])
def test_float32_stays_finite_at_extreme_ratios(advantage, gap):
    objective = PolicyObjective(kl_coefficient=0.1, entropy_coefficient=0.1)
    log_probs = torch.tensor([gap], requires_grad=True)
    columns = columns_of([advantage], [0.0], reference=[0.0], dtype=torch.float32)
    result = objective(log_probs, torch.zeros(1), columns)
    result.loss.sum().backward()
    assert result.loss.dtype == torch.float32
    assert result.loss.isfinite().all()
    assert log_probs.grad.isfinite().all()
    assert all(value.isfinite().all() for value in result.stats.values())


def test_a_log_prob_that_is_not_a_number_is_not_hidden():
    result = PolicyObjective()(tensor([math.nan]), tensor([0.0]), columns_of([1.0], [0.0]))
    assert result.loss.isnan().all()


def tensor(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def columns_of(advantages, old, *, reference=None, correction=None, lengths=None, dtype=torch.float64) -> LossColumns:
    sizes = torch.tensor([len(old)] if lengths is None else lengths)
    return LossColumns(
        advantages=tensor(advantages, dtype),
        old_log_probs=tensor(old, dtype),
        sequence_index=torch.arange(len(sizes)).repeat_interleave(sizes),
        sequence_lengths=sizes,
        reference_log_probs=None if reference is None else tensor(reference, dtype),
        correction=None if correction is None else tensor(correction, dtype),
    )


LOG_PROBS = [-1.0, -0.4, -2.0, -0.9]
OLD = [-1.1, -0.9, -2.0, -0.2]
REFERENCE = [-0.8, -0.6, -2.5, -1.0]
ADVANTAGES = [1.5, 1.5, -0.5, -0.5]
CORRECTION = [0.5, 1.0, 2.0, 1.5]
ENTROPY = [0.3, 0.6, 0.9, 1.2]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_all_terms_together(estimator, aggregation):
    objective = PolicyObjective(
        loss=Clipped(dual=DUAL),
        kl_coefficient=0.05,
        kl_estimator=estimator,
        kl_aggregation=aggregation,
        entropy_coefficient=0.01,
    )
    formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[estimator]
    gaps = [new - ref for new, ref in zip(LOG_PROBS, REFERENCE, strict=True)]
    penalties = [formula(d) for d in gaps]
    if aggregation == "sequence":
        penalties = [formula(gaps[0]), *[formula(sum(gaps[1:])) / 3] * 3]
    expected = [
        CORRECTION[i] * equation_8(math.exp(LOG_PROBS[i] - OLD[i]), ADVANTAGES[i], DUAL)
        + 0.05 * penalties[i]
        - 0.01 * ENTROPY[i]
        for i in range(4)
    ]
    columns = columns_of(ADVANTAGES, OLD, reference=REFERENCE, correction=CORRECTION, lengths=[1, 3])
    result = objective(tensor(LOG_PROBS), tensor(ENTROPY), columns)
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-12)
    assert set(result.stats) == set(objective.stat_names)
    assert result.stats["kl"].tolist() == pytest.approx(penalties, rel=1e-12)
    log_probs, entropy = (tensor(values).requires_grad_() for values in (LOG_PROBS, ENTROPY))
    weights = tensor([0.4, 0.1, 0.1, 0.1])  # equal inside a response, as every aggregation's are
    assert gradcheck(lambda x, h: (weights * objective(x, h, columns).loss).sum(), (log_probs, entropy), eps=1e-7)


def test_statistics():
    ratios = [1.5, 1.5, 0.5, 0.5, 20.0, 1.0]
    advantages = [1.0, -1.0, 1.0, -1.0, -1.0, 1.0]
    old = [-1.0, -2.0, -3.0, -1.0, -4.0, -1.0]
    log_probs = [before + math.log(ratio) for before, ratio in zip(old, ratios, strict=True)]
    stats = PolicyObjective(loss=Clipped(dual=DUAL))(
        tensor(log_probs), tensor([0.0] * 6), columns_of(advantages, old)
    ).stats
    assert stats["clipped_high"].tolist() == [1, 0, 0, 0, 0, 0]
    assert stats["clipped_low"].tolist() == [0, 0, 0, 1, 0, 0]
    assert stats["clipped_dual"].tolist() == [0, 0, 0, 0, 1, 0]
    new = [1.5 * math.exp(-1), 0, 0, 0, 0, 0]
    assert stats["clipped_high_prob"].tolist() == pytest.approx(new), "of pi, not pi_old: figure 3a"
    assert stats["approx_kl_old"].tolist() == pytest.approx([r - 1 - math.log(r) for r in ratios], abs=1e-12)


@given(st.floats(0.01, 30), st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3))
def test_a_token_counts_as_clipped_exactly_where_its_gradient_is_cut(ratio, advantage):
    log_probs = tensor([math.log(ratio)]).requires_grad_()
    objective = PolicyObjective(loss=Clipped(dual=DUAL))
    result = objective(log_probs, tensor([0.0]), columns_of([advantage], [0.0]))
    result.loss.sum().backward()
    clipped = sum(result.stats[name].item() for name in ("clipped_low", "clipped_high", "clipped_dual"))
    assert (log_probs.grad.item() == 0) == (clipped == 1)


def test_without_the_optional_terms_nothing_optional_is_read_or_reported():
    objective = PolicyObjective()
    assert objective.stat_names == ("approx_kl_old", "clipped_low", "clipped_high", "clipped_high_prob")
    assert not objective.uses_entropy_gradient
    result = objective(tensor([-1.0]), tensor([math.nan]), columns_of([1.0], [-1.0]))
    assert result.loss.tolist() == [-1.0]


def test_no_tokens():
    result = PolicyObjective()(tensor([]), tensor([]), columns_of([], []))
    assert result.loss.shape == (0,)


def test_supervised_loss_is_the_cross_entropy():
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 3, 6, 2, 2])
    log_probs = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    result = SupervisedObjective()(log_probs, torch.zeros(5, dtype=torch.float64), None)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(result.loss, expected)
    assert result.stats == {}
    assert SupervisedObjective().stat_names == ()
