"""Paired differences over seeds: Student's interval, and Holm's correction for how many of them are looked at."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

ALPHA = 0.05
Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """Mean of n paired differences with its 95% interval; without one where n is 1."""

    mean: float
    low: float | None
    high: float | None
    p: float | None
    """Two-sided probability of a mean as far from 0, were there no difference."""
    n: int

    @property
    def excludes_zero(self) -> bool:
        return self.p is not None and self.p < ALPHA


def paired(differences: Sequence[float]) -> Paired:
    """Student's t interval of the mean, n - 1 degrees of freedom.

    Raises:
        ValueError: there is no difference.
    """
    n = len(differences)
    if not n:
        raise ValueError("no pair of runs: a comparison needs one seed with both rungs")
    mean = math.fsum(differences) / n
    if n == 1:
        return Paired(mean=mean, low=None, high=None, p=None, n=1)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in differences) / (n - 1) / n)
    if error == 0:
        return Paired(mean=mean, low=mean, high=mean, p=float(mean == 0), n=n)
    half = t_quantile(n - 1) * error
    return Paired(mean=mean, low=mean - half, high=mean + half, p=1 - t_within(mean / error, n - 1), n=n)


def t_within(t: float, freedom: int) -> float:
    """Probability that Student's t of `freedom` degrees lies within [-|t|, |t|].

    The finite series for whole degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    angle = math.atan2(abs(t), math.sqrt(freedom))
    square = math.cos(angle) ** 2
    term, total = 1.0, 0.0
    first = 3 if freedom % 2 else 2
    for at in range(first, freedom + 1, 2):
        total += term
        term *= square * (at - 1) / at
    if freedom % 2 == 0:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)


def t_quantile(freedom: int, within: float = 1 - ALPHA) -> float:
    """The t with t_within(t, freedom) = within, by bisection."""
    low, high = 0.0, 1.0
    while t_within(high, freedom) < within:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < within else (low, middle)
    return (low + high) / 2


def holm(probabilities: Mapping[Key, float]) -> dict[Key, float]:
    """Holm's adjusted probabilities: below ALPHA for all that may be called real, with 95% safety for the family."""
    adjusted: dict[Key, float] = {}
    highest = 0.0
    for rank, key in enumerate(sorted(probabilities, key=lambda key: probabilities[key])):
        highest = max(highest, min(1.0, (len(probabilities) - rank) * probabilities[key]))
        adjusted[key] = highest
    return adjusted
