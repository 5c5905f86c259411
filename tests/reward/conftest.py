"""The labelled cases, and pools that are closed whatever a test does."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from reward.config import RewardConfig
from reward.pool.pool import RewardPool
from reward.verdict import Deferred, Judgement, VerificationRequest
from reward.verifiers import robust

# No deadline for single examples: the machine may be busy. Verdicts have their own limits, tested as such.
settings.register_profile("reward", deadline=None)
settings.load_profile("reward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of cases.jsonl: a response with its label under both rules."""

    group: str
    response: str
    ground_truth: str
    robust: bool
    exact: bool
    prompt: str = ""


def load_cases() -> list[Case]:
    """All labelled cases."""
    lines = (Path(__file__).parent / "cases.jsonl").read_text(encoding="ascii").splitlines()
    return [Case(**json.loads(line)) for line in lines]


def judge_robust(response: str, ground_truth: str, prompt: str = "") -> Judgement:
    """The verdict of `robust` in this process, algebra included."""
    judged = robust.judge(VerificationRequest(response=response, ground_truth=ground_truth, prompt=prompt))
    return robust.finish(judged) if isinstance(judged, Deferred) else judged


@pytest.fixture
def make_pool() -> Iterator[Callable[..., RewardPool]]:
    """Makes pools from the fields of RewardConfig and closes them at the end."""
    pools: list[RewardPool] = []

    def make(**fields: int | float) -> RewardPool:
        pools.append(RewardPool(RewardConfig(**fields)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
