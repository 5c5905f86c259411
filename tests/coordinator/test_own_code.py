"""A user's own loss and advantages are tried before anything starts; what fails or depends on packing is refused."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from megatron_dapo.algorithm.losses import LOSSES
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
    ("name", "said"),
    [
        ("OneMean", r"loss has the shape \[\]; it must be one number a token"),
        ("NoStatistic", r"KeyError\('outside'\)"),
        ("OneStatistic", r"outside has the shape \[\]"),
        ("NoColumn", r"AttributeError\(.*returns"),
        ("NeedsReference", "'NoneType' object has no attribute 'exp'"),
    ],
)
def test_a_loss_that_cannot_be_summed_token_by_token_is_refused(name, said):
    with pytest.raises(ConfigError, match=rf"algorithm.policy_loss = {HERE}:{name}, on two tokens: .*{said}"):
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
