"""Every loss of the family against its paper's equation in plain Python, its gradient against numeric differentiation
or the policy gradient that the paper states. float64."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from torch.autograd import gradcheck

from megatron_dapo.algorithm.losses import LOSSES
from megatron_dapo.algorithm.losses.cispo import CISPO
from megatron_dapo.algorithm.losses.clipped import Clipped
from megatron_dapo.algorithm.losses.gmpo import GMPO
from megatron_dapo.algorithm.losses.gspo import GSPO
from megatron_dapo.algorithm.losses.reinforce import Reinforce
from megatron_dapo.algorithm.losses.sapo import SAPO
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.algorithm.token_loss import LossColumns

LENGTHS = [3, 1, 4, 2]
ADVANTAGES = [1.3, -0.7, -1.1, 0.9]
RATIOS = [1.9, 0.4, 1.1, 2.5, 0.3, 1.6, 0.9, 1.05, 0.5, 3.0]
"""Of the ten tokens, response after response: free and clipped ones on both sides, with either sign of A."""

TO_ENGINE = [0.5, 1.2, 5.0, 2.5, 0.1, 0.9, 3.0, 1.4, 8.0, 0.2]
"""pi / mu of the same tokens."""


def by_response(values: Sequence[float]) -> list[list[float]]:
    parts, start = [], 0
    for length in LENGTHS:
        parts.append(list(values[start : start + length]))
        start += length
    return parts


def columns() -> tuple[torch.Tensor, LossColumns]:
    log_probs = torch.linspace(-2.5, -0.3, sum(LENGTHS), dtype=torch.float64)
    ratios, engine = (torch.tensor(values, dtype=torch.float64).log() for values in (RATIOS, TO_ENGINE))
    sizes = torch.tensor(LENGTHS)
    return log_probs, LossColumns(
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64).repeat_interleave(sizes),
        old_log_probs=log_probs - ratios,
        rollout_log_probs=log_probs - engine,
        sequence_index=torch.arange(len(LENGTHS)).repeat_interleave(sizes),
        sequence_lengths=sizes,
    )


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def clipped(low: float, high: float) -> float:
    """DAPO eq. 8 over responses: the mean of each response's token mean."""
    terms = [
        math.fsum(min(r * a, clip(r, 1 - low, 1 + high) * a) for r in ratios) / len(ratios)
        for ratios, a in zip(by_response(RATIOS), ADVANTAGES, strict=True)
    ]
    return -math.fsum(terms) / len(terms)


def gspo(low: float, high: float) -> float:
    """GSPO: one length-normalised ratio a response."""
    terms = []
    for ratios, a in zip(by_response(RATIOS), ADVANTAGES, strict=True):
        s = math.prod(ratios) ** (1 / len(ratios))
        terms.append(min(s * a, clip(s, 1 - low, 1 + high) * a))
    return -math.fsum(terms) / len(terms)


def gmpo(low: float, high: float) -> float:
    """GMPO: the geometric mean of |min(r A, clip(r) A)|, with the sign of A."""
    terms = []
    for ratios, a in zip(by_response(RATIOS), ADVANTAGES, strict=True):
        each = [abs(min(r * a, clip(r, 1 - low, 1 + high) * a)) for r in ratios]
        terms.append(math.copysign(math.prod(each) ** (1 / len(each)), a))
    return -math.fsum(terms) / len(terms)


def sapo(positive: float, negative: float) -> float:
    terms = []
    for ratios, a in zip(by_response(RATIOS), ADVANTAGES, strict=True):
        tau = positive if a > 0 else negative
        gates = [4 / tau / (1 + math.exp(-tau * (r - 1))) for r in ratios]
        terms.append(a * math.fsum(gates) / len(gates))
    return -math.fsum(terms) / len(terms)


def weights() -> torch.Tensor:
    sizes = torch.tensor(LENGTHS)
    return (1.0 / (len(LENGTHS) * sizes.double())).repeat_interleave(sizes)


VALUES = {
    "clipped": (Clipped(low=0.2, high=0.28), clipped(0.2, 0.28)),
    "gspo": (GSPO(low=0.1, high=0.15), gspo(0.1, 0.15)),
    "gspo, tight": (GSPO(low=3e-4, high=4e-4), gspo(3e-4, 4e-4)),
    "gmpo": (GMPO(low=1 - math.exp(-0.4), high=math.exp(0.4) - 1), gmpo(1 - math.exp(-0.4), math.exp(0.4) - 1)),
    "gmpo, no lower bound": (GMPO(low=1.0, high=0.5), gmpo(1.0, 0.5)),
    "sapo": (SAPO(), sapo(1.0, 1.05)),
    "sapo, other": (SAPO(positive=2.0, negative=0.5), sapo(2.0, 0.5)),
}


@pytest.mark.parametrize("name", VALUES)
def test_value_and_gradient_are_the_papers(name):
    loss, wanted = VALUES[name]
    log_probs, given = columns()
    assert (weights() * loss(log_probs, given).loss).sum().item() == pytest.approx(wanted, rel=1e-12)
    assert gradcheck(lambda x: (weights() * loss(x, given).loss).sum(), (log_probs.requires_grad_(),), eps=1e-7)


DETACHED = [
    (CISPO(low=0.3, high=0.5), [clip(r, 0.7, 1.5) for r in RATIOS]),
    (CISPO(low=1.0, high=1.0), [min(r, 2.0) for r in RATIOS]),
    (Reinforce(upper=2.0), [min(r, 2.0) for r in TO_ENGINE]),
]
EVERY = [loss for loss, _ in (*VALUES.values(), *DETACHED)]


@pytest.mark.parametrize(("loss", "factors"), DETACHED, ids=str)
def test_a_detached_weight_gives_the_policy_gradient_that_its_paper_states(loss, factors):
    """Of -J, in each log-prob: minus the weight times A, clipped or not."""
    log_probs, given = columns()
    result = loss(log_probs.requires_grad_(), given)
    result.loss.sum().backward()
    wanted = [-factor * a for factor, a in zip(factors, given.advantages.tolist(), strict=True)]
    assert log_probs.grad.tolist() == pytest.approx(wanted, rel=1e-12)
    value = [slope * x for slope, x in zip(wanted, log_probs.tolist(), strict=True)]
    assert result.loss.tolist() == pytest.approx(value, rel=1e-12)


def test_on_policy_all_have_the_policy_gradient():
    """At pi = pi_old = mu: -A in each token's log-prob. A response's ratio spreads it over the tokens, evenly."""
    log_probs, given = columns()
    on_policy = LossColumns(
        advantages=given.advantages,
        old_log_probs=log_probs.clone(),
        rollout_log_probs=log_probs.clone(),
        sequence_index=given.sequence_index,
        sequence_lengths=given.sequence_lengths,
    )
    for loss in EVERY:
        point = log_probs.clone().requires_grad_()
        (weights() * loss(point, on_policy).loss).sum().backward()
        torch.testing.assert_close(point.grad, -weights() * given.advantages, rtol=1e-12, atol=0, msg=str(loss))


def test_statistics_say_where_a_gradient_is_cut():
    log_probs, given = columns()
    for loss in (Clipped(), GMPO(low=0.3, high=0.5)):
        point = log_probs.clone().requires_grad_()
        result = loss(point, given)
        result.loss.sum().backward()
        cut = result.stats["clipped_low"] + result.stats["clipped_high"]
        assert torch.equal(point.grad == 0, cut == 1)
        assert 0 < cut.sum() < len(cut)
    point = log_probs.clone().requires_grad_()
    result = GSPO(low=0.1, high=0.15)(point, given)
    result.loss.sum().backward()
    cut = result.stats["clipped_low"] + result.stats["clipped_high"]
    assert torch.equal(point.grad == 0, cut == 1), "whole responses"
    assert cut.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("gap", [-1e4, -30.0, 0.0, 30.0, 1e4])
def test_float32_stays_finite_and_every_statistic_is_named(gap):
    for loss in EVERY:
        for advantage in (-2.0, 0.0, 2.0):
            log_probs = torch.tensor([gap, -1.0], requires_grad=True)
            objective = PolicyObjective(loss=loss)
            result = objective(
                log_probs,
                torch.zeros(2),
                LossColumns(
                    advantages=torch.full((2,), advantage),
                    old_log_probs=torch.tensor([0.0, -1.0]),
                    rollout_log_probs=torch.tensor([0.0, -1.0]),
                    sequence_index=torch.zeros(2, dtype=torch.int64),
                    sequence_lengths=torch.tensor([2]),
                ),
            )
            result.loss.sum().backward()
            assert result.loss.dtype == torch.float32
            assert result.loss.isfinite().all()
            assert log_probs.grad.isfinite().all()
            assert tuple(result.stats) == objective.stat_names


def test_the_table_names_every_file_and_each_loss_has_its_formula_here():
    from importlib import import_module
    from pathlib import Path

    import megatron_dapo.algorithm.losses as folder

    files = {file.stem for file in Path(folder.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == LOSSES.keys()
    assert {entry.path for entry in LOSSES.values()} == {
        f"{type(loss).__module__}:{type(loss).__name__}" for loss in EVERY
    }
    for entry in LOSSES.values():
        module, _, name = entry.path.partition(":")
        fields = {key.rpartition(".")[2] for key in entry.reads} | set(entry.options)
        assert {each.name for each in dataclasses.fields(getattr(import_module(module), name))} == fields
