"""How sure an accuracy is: 95% intervals for proportions, also where a problem was answered several times.

Example: 848 of 1000 right: 84.8% [82.4, 86.9]. The same 84.8% from 8 answers to each of 125 problems is less sure,
since answers to one problem resemble each other.
"""

import math
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
"""97.5% quantile of the normal distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """A share of right answers with its 95% interval, all in [0, 1]."""

    accuracy: float
    low: float
    high: float
    n: int
    """Answers judged."""
    problems: int
    """Problems that they answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """after - before with its 95% interval, in [-1, 1]."""

    value: float
    low: float
    high: float


def wilson_accuracy(correct: int, n: int) -> Accuracy:
    """Wilson's score interval for `correct` of `n` independent answers, one a problem.

    Its ends are the p with |correct / n - p| = z sqrt(p (1 - p) / n): sensible also at 0, at 1 and for small n.

    Raises:
        ValueError: there are no answers, or more right ones than answers.
    """
    if n <= 0 or not 0 <= correct <= n:
        raise ValueError(f"{correct} right of {n} answers: n must be positive and the right ones in 0..n")
    low, high = _wilson(correct / n, n)
    return Accuracy(accuracy=correct / n, low=low, high=high, n=n, problems=n)


def clustered_accuracy(correct: np.ndarray) -> Accuracy:
    """Interval for answers that come in clusters, k answers to each of P problems: a cluster is the unit of chance.

    The variance of the mean is taken from the spread of the P problems' own accuracies; Wilson's interval is then
    computed for the number of independent answers that would vary as much. With k = 1 it is nearly Wilson's own.

    Args:
        correct: bool [P, k].

    Raises:
        ValueError: there are no answers.
    """
    if correct.ndim != 2 or correct.size == 0:
        raise ValueError(f"answers of shape {list(correct.shape)}: must be [problems, samples], neither of them 0")
    problems, samples = correct.shape
    rates = correct.mean(axis=1, dtype=np.float64)
    accuracy = float(rates.mean())
    variance = float(rates.var(ddof=1)) / problems if problems > 1 else 0.0
    # All right, all wrong or one problem: the data say nothing about how alike the answers are. Assume: quite alike.
    independent = float(problems)
    if variance > 0:
        independent = min(accuracy * (1 - accuracy) / variance, float(problems * samples))
    low, high = _wilson(accuracy, independent)
    return Accuracy(accuracy=accuracy, low=low, high=high, n=problems * samples, problems=problems)


def difference(before: Accuracy, after: Accuracy) -> Difference:
    """Newcombe's interval for after - before, from both Wilson intervals.

    It takes the two for independent. On the same problems they are not: the true interval is then narrower as a rule.
    """
    value = after.accuracy - before.accuracy
    down = math.hypot(after.accuracy - after.low, before.high - before.accuracy)
    up = math.hypot(after.high - after.accuracy, before.accuracy - before.low)
    return Difference(value=value, low=value - down, high=value + up)


def _wilson(share: float, n: float) -> tuple[float, float]:
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)
