"""A user's own loss and advantages are tried before anything starts; what fails or depends on packing is refused."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from megatron_dapo.algorithm.losses import LOSSES
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.algorithm.token_loss import LossColumns, TokenLoss
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.coordinator.inputs import check_own_code
from tests.processes import ROOT

HERE = "tests.coordinator.test_own_code"


@dataclass(frozen=True, kw_only=True, slots=True)
class OneMean:
    stat_names: ClassVar[tuple[str, ...]] = ()

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss:
        return TokenLoss(loss=(-log_probs * columns.advantages).mean(), stats={})


@dataclass(frozen=True, kw_only=True, slots=True)
class NoStatistic:
    stat_names: ClassVar[tuple[str, ...]] = ("outside",)

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss:
        return TokenLoss(loss=-log_probs * columns.advantages, stats={})


@dataclass(frozen=True, kw_only=True, slots=True)
class OneStatistic:
    stat_names: ClassVar[tuple[str, ...]] = ("outside",)

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss:
        return TokenLoss(loss=-log_probs * columns.advantages, stats={"outside": log_probs.mean()})


@dataclass(frozen=True, kw_only=True, slots=True)
class NoColumn:
    stat_names: ClassVar[tuple[str, ...]] = ()

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss:
        return TokenLoss(loss=log_probs * columns.returns, stats={})


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedsReference:
    stat_names: ClassVar[tuple[str, ...]] = ()

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss:
        return TokenLoss(loss=log_probs * columns.reference_log_probs.exp(), stats={})


@dataclass(frozen=True, kw_only=True, slots=True)
class NoGradient:
    stat_names: ClassVar[tuple[str, ...]] = ()

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss:
        return TokenLoss(loss=-log_probs.detach() * columns.advantages, stats={})


@dataclass(frozen=True, kw_only=True, slots=True)
class OneLength:
    stat_names: ClassVar[tuple[str, ...]] = ()

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss:
        rows = log_probs.view(len(columns.sequence_lengths), -1)
        return TokenLoss(loss=-rows.cumsum(1).flatten() * columns.advantages, stats={})


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedsAToken:
    stat_names: ClassVar[tuple[str, ...]] = ()

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss:
        return TokenLoss(loss=-log_probs * columns.advantages / columns.advantages.max().clamp(min=1), stats={})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fails:
    stat_names: ClassVar[tuple[str, ...]] = ()

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss:
        raise ValueError("more tokens than I know")


@dataclass(frozen=True, kw_only=True, slots=True)
class Differentiates:
    stat_names: ClassVar[tuple[str, ...]] = ()

    def __call__(self, log_probs: Tensor, columns: LossColumns) -> TokenLoss:
        if columns.correction is not None:
            raise ValueError("set importance.mode=none")
        (slope,) = torch.autograd.grad(log_probs.exp().sum(), log_probs)
        return TokenLoss(loss=-log_probs * columns.advantages * slope, stats={})


def of_rewards_alone(rewards: Tensor) -> Tensor:
    return rewards


def config(*overrides: str):
    return load_config(ROOT / "examples" / "quickstart" / "dapo.yaml", list(overrides))


@pytest.mark.parametrize(
    ("name", "tried", "said"),
    [
        ("OneMean", 2, r"loss has the shape \[\]; it must be one number a token"),
        ("NoStatistic", 2, r"KeyError\('outside'\)"),
        ("OneStatistic", 2, r"outside has the shape \[\]"),
        ("NoColumn", 2, r"AttributeError\(.*returns"),
        ("NeedsReference", 2, "'NoneType' object has no attribute 'exp'"),
        ("NoGradient", 2, "the loss has no gradient"),
        ("OneLength", 2, "shape '\\[2, -1\\]' is invalid"),
        ("NeedsAToken", 0, "max()"),
    ],
)
def test_a_loss_that_cannot_be_summed_token_by_token_is_refused(name, tried, said):
    with pytest.raises(ConfigError, match=rf"algorithm.policy_loss = {HERE}:{name}, on {tried} responses.*: .*{said}"):
        check_own_code(config(f"algorithm.policy_loss={HERE}:{name}"))


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"algorithm.policy_loss={name}"] for name in LOSSES),
        [f"algorithm.policy_loss={HERE}:Differentiates"],
        [f"algorithm.policy_loss={HERE}:NeedsReference", "algorithm.kl.coefficient=0.1"],
        ["algorithm.kl.coefficient=0.1", "algorithm.kl.aggregation=sequence"],
        ["algorithm.entropy_coefficient=0.01", "algorithm.importance.mode=truncated"],
    ],
    ids=lambda overrides: overrides[0].partition("=")[2],
)
def test_others_pass(overrides):
    check_own_code(config(*overrides))


def test_advantages_that_fail_are_named():
    name = f"{HERE}:of_rewards_alone"
    with pytest.raises(ConfigError, match=rf"algorithm.advantage.estimator = {name}: TypeError\(.*positional argument"):
        check_own_code(config(f"algorithm.advantage.estimator={name}"))


def test_a_loss_that_fails_later_is_named():
    tokens = torch.zeros(1)
    columns = LossColumns(
        advantages=tokens, old_log_probs=tokens, sequence_index=torch.tensor([0]), sequence_lengths=torch.tensor([1])
    )
    with pytest.raises(RuntimeError, match=r"algorithm.policy_loss \(Fails\): ValueError\('more tokens than I know'\)"):
        PolicyObjective(loss=Fails())(tokens, tokens, columns)
