"""Lengths and verdicts of the groups that a plan lets its servers write.

Assumed: the length of a response is lognormal and is cut off at `rollout.max_new_tokens`. A part of its variance lies
between prompts and goes with difficulty z, standard normal: a hard prompt has long responses. A response is right with
probability 1 / (1 + exp(k z)); k is such that the share of groups that dynamic sampling keeps is the pass rate given.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_dapo.algorithm.dynamic_sampling import keep_group

_SAMPLE = 4096
_STEEPEST = 200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What the responses of a run look like."""

    mean_response: float
    """Tokens, before any is cut off."""

    sigma: float
    """Standard deviation of the logarithm of the length."""

    difficulty_share: float
    """Share of sigma squared between prompts, 0..1."""

    mean_prompt: float
    """Tokens."""

    pass_rate: float
    """Share of groups that dynamic sampling keeps, above 0 and below 1."""

    longest: int
    """`rollout.max_new_tokens`."""

    group_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One prompt's responses: Group(lengths=(3100, 20480, 950, 4200), correct=1)."""

    lengths: tuple[int, ...]
    correct: int

    @property
    def kept(self) -> bool:
        """Eq. 11."""
        return keep_group(self.correct, len(self.lengths))


def draw_group(workload: Workload, difficulty: float, random: np.random.Generator) -> Group:
    """All responses to a prompt of this difficulty, drawn anew each time."""
    between = workload.sigma * math.sqrt(workload.difficulty_share)
    within = workload.sigma * math.sqrt(1 - workload.difficulty_share)
    median = math.log(workload.mean_response) - workload.sigma**2 / 2
    logs = median + between * difficulty + within * random.standard_normal(workload.group_size)
    lengths = np.clip(np.exp(logs), 1, workload.longest).astype(int)
    right = random.binomial(workload.group_size, _right(_steepness(workload) * difficulty))
    return Group(lengths=tuple(lengths.tolist()), correct=int(right))


def groups(workload: Workload, seed: int) -> Iterator[Group]:
    """Groups without end, the same for the same seed."""
    random = np.random.default_rng(seed)
    while True:
        yield draw_group(workload, random.standard_normal(), random)


def _right(slope: float | np.ndarray) -> float | np.ndarray:
    return 1 / (1 + np.exp(np.clip(slope, -500, 500)))


@functools.cache
def _steepness(workload: Workload) -> float:
    """k, by bisection over a fixed sample of difficulties."""
    difficulty = np.random.default_rng(0).standard_normal(_SAMPLE)
    low, high = 0.0, _STEEPEST
    for _ in range(50):
        middle = (low + high) / 2
        right = _right(middle * difficulty)
        kept = float(np.mean(1 - right**workload.group_size - (1 - right) ** workload.group_size))
        low, high = (middle, high) if kept > workload.pass_rate else (low, middle)
    return low
