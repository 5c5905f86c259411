"""Estimators of KL: values and gradients, and what their expectations are over a whole small distribution."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from megatron_dapo.algorithm.kl import kl_estimate, sequence_kl_estimate

ESTIMATORS = ["k1", "k2", "k3"]
FORMULA = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
SLOPE = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1 - math.exp(-d)}


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(st.floats(-15, 15))
def test_token_estimate(estimator, d):
    got = kl_estimate(tensor(d - 1.0), tensor(-1.0), estimator).item()
    assert got == pytest.approx(FORMULA[estimator](d), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_token_gradient_is_the_numeric_one(estimator):
    log_probs = tensor(-0.1, -1.0, -2.5, -4.0).requires_grad_()
    assert gradcheck(lambda x: kl_estimate(x, tensor(-0.5, -1.0, -1.0, -6.0), estimator), (log_probs,))


@given(st.floats(-(2**-10), 2**-10, width=32))
def test_k3_is_never_negative_in_float32(d):
    assert kl_estimate(torch.tensor([d]), torch.zeros(1), "k3").item() >= -1e-10


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sequence_estimate_and_gradient(estimator):
    lengths = [2, 3, 1]
    log_probs, reference = tensor(-0.1, -1.0, -2.5, -0.7, -0.3, -1.1), tensor(-0.5, -0.8, -1.0, -1.4, -0.2, -1.1)
    weight = [0.3, 0.1, 0.2]  # of each token of a response
    index = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    weights = tensor(*weight)[index]

    def loss(x):
        return weights * sequence_kl_estimate(
            x, reference, estimator, sequence_index=index, sequence_lengths=torch.tensor(lengths)
        )

    gaps = [group.sum().item() for group in (log_probs - reference).split(lengths)]
    assert loss(log_probs).sum().item() == pytest.approx(
        sum(w * FORMULA[estimator](d) for w, d in zip(weight, gaps, strict=True)), rel=1e-12
    )
    leaf = log_probs.clone().requires_grad_()
    loss(leaf).sum().backward()
    expected = [w * SLOPE[estimator](d) for w, d, n in zip(weight, gaps, lengths, strict=True) for _ in range(n)]
    assert leaf.grad.tolist() == pytest.approx(expected, rel=1e-12)
    assert gradcheck(lambda x: loss(x).sum(), (leaf,))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gap", [-25.0, -19.0, 25.0])
def test_a_response_of_one_token_has_the_gradient_of_the_token_also_beyond_the_bound(estimator, gap):
    one, other = (tensor(gap).requires_grad_() for _ in range(2))
    kl_estimate(one, tensor(0.0), estimator).sum().backward()
    first, length = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    sequence_kl_estimate(other, tensor(0.0), estimator, sequence_index=first, sequence_lengths=length).sum().backward()
    assert other.grad.item() == pytest.approx(one.grad.item(), rel=1e-12)


def test_with_k1_whole_responses_and_tokens_agree():
    log_probs, reference = tensor(-0.1, -1.0, -2.5), tensor(-0.5, -0.8, -1.0)
    whole = sequence_kl_estimate(
        log_probs, reference, "k1", sequence_index=torch.tensor([0, 0, 1]), sequence_lengths=torch.tensor([2, 1])
    )
    assert whole.sum().item() == pytest.approx(kl_estimate(log_probs, reference, "k1").sum().item())


def expectation_of_gradients(estimator: str, level: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over all 9 two-token responses of a 3-token vocabulary: (E[grad of the estimate], grad KL, grad reverse KL)."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 3, dtype=torch.float64, generator=generator).requires_grad_()  # row 0: first token
    other = torch.randn(4, 3, dtype=torch.float64, generator=generator).log_softmax(-1)
    policy = logits.log_softmax(-1)
    total, forward, reverse = 0.0, 0.0, 0.0
    for first, second in itertools.product(range(3), range(3)):
        mine = torch.stack([policy[0, first], policy[1 + first, second]])
        theirs = torch.stack([other[0, first], other[1 + first, second]])
        if level == "token":
            estimate = kl_estimate(mine, theirs, estimator).sum()
        else:
            index, lengths = torch.zeros(2, dtype=torch.int64), torch.tensor([2])
            estimate = sequence_kl_estimate(
                mine, theirs, estimator, sequence_index=index, sequence_lengths=lengths
            ).sum()
        total = total + mine.sum().exp().detach() * estimate
        forward = forward + mine.sum().exp() * (mine.sum() - theirs.sum())
        reverse = reverse + theirs.sum().exp() * (theirs.sum() - mine.sum())
    return tuple(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (total, forward, reverse))


def test_as_a_loss_k1_does_nothing_k2_is_kl_and_k3_the_reverse_kl():
    """What the docstring of kl.py claims, by enumeration of every response."""
    zero = torch.zeros(4, 3, dtype=torch.float64)
    for level in ("token", "sequence"):
        k1, _, _ = expectation_of_gradients("k1", level)
        torch.testing.assert_close(k1, zero, rtol=0, atol=1e-12)
    k2, forward, _ = expectation_of_gradients("k2", "sequence")
    torch.testing.assert_close(k2, forward, rtol=1e-9, atol=1e-12)
    k3, _, reverse = expectation_of_gradients("k3", "sequence")
    torch.testing.assert_close(k3, reverse, rtol=1e-9, atol=1e-12)
    token_k2, forward, _ = expectation_of_gradients("k2", "token")
    assert not torch.allclose(token_k2, forward, atol=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gap", [-1e4, -50.0, 50.0, 1e4])
def test_float32_stays_finite(estimator, gap):
    leaf = torch.full((3,), gap, requires_grad=True)
    token = kl_estimate(leaf, torch.zeros(3), estimator).sum()
    whole = sequence_kl_estimate(
        leaf,
        torch.zeros(3),
        estimator,
        sequence_index=torch.zeros(3, dtype=torch.int64),
        sequence_lengths=torch.tensor([3]),
    ).sum()
    (token + whole).backward()
    assert (token + whole).isfinite()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(("gap", "gradient"), [(-19.0, 1 - math.exp(19)), (-25.0, 0.0), (30.0, 1.0)])
def test_k3_never_pushes_away_from_the_reference(gap, gradient):
    """Below the bound both of its parts are held: the linear one alone would raise the gap."""
    leaf = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
    kl_estimate(leaf, torch.zeros(1, dtype=torch.float64), "k3").sum().backward()
    assert leaf.grad.item() == pytest.approx(gradient)


def test_the_sum_over_a_long_response_does_not_depend_on_its_order():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (-torch.rand(20480, generator=generator) * 8 for _ in range(2))
    order, index = torch.randperm(20480, generator=generator), torch.zeros(20480, dtype=torch.int64)
    whole = {"sequence_index": index, "sequence_lengths": torch.tensor([20480])}
    first, second = (
        sequence_kl_estimate(mine, reference, "k2", **whole)[0]
        for mine, reference in ((ours, theirs), (ours[order], theirs[order]))
    )
    torch.testing.assert_close(first, second, rtol=1e-7, atol=0)
