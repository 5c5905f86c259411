"""How sure a figure is: 95% intervals of accuracies, and avg@k, pass@k and cons@k of problems answered n times each.

Example: 848 of 1000 right: 84.8% [82.4, 86.9]. The same 84.8% from 8 answers to each of 125 problems is less sure,
since answers to one problem resemble each other.

All figures are means over problems of one number a problem. Problems are the unit of chance: the variance of the mean
is taken from the spread of their numbers, and Wilson's interval is computed for the number of independent answers that
would vary as much. With one answer a problem it is nearly Wilson's own.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

EVALUATIONS = "evaluations"
"""Folder of a run's held-out results, one folder each: `before`, `step12`, `after`, those of `megatron-dapo eval`."""

NO_GUESSING = "no guessing"
STAGES = {"before": "before", "baseline": f"before, {NO_GUESSING}", "after": "after"}
"""Held-out measurements of a run, in their order, with their labels."""

WAYS = ("sampled", "greedy")

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
class Answers:
    """To all problems of an evaluation, in one decoding mode."""

    figures: Accuracy
    texts: tuple[str, ...] = ()
    """The first response to each problem."""
    correct: tuple[bool, ...] = ()
    """Its verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over problems, or a difference of two accuracies, with its 95% interval."""

    value: float
    low: float
    high: float


_STAGES = TypeAdapter(dict[str, dict[str, Accuracy] | None])


def by_way(heldout: Mapping[str, Any]) -> dict[str, dict[str, Accuracy]]:
    """The `heldout` of summary.json, turned: {"sampled": {"before": Accuracy(...), "after": ...}, "greedy": ...}, of
    what was measured."""
    known = {stage: ways for stage, ways in _STAGES.validate_python(heldout).items() if ways}
    turned = {way: {stage: known[stage][way] for stage in STAGES if way in known.get(stage, {})} for way in WAYS}
    return {way: stages for way, stages in turned.items() if stages}


def percent(value: float, low: float, high: float) -> str:
    """`35.8% [32.9, 38.8]`: a share and the ends of its interval."""
    return f"{100 * value:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"


def clustered_accuracy(correct: np.ndarray) -> Accuracy:
    """Of k answers to each of P problems.

    Args:
        correct: bool [P, k], neither of them 0.
    """
    problems, samples = correct.shape
    found = mean_with_interval(correct.mean(axis=1, dtype=np.float64), samples)
    return Accuracy(accuracy=found.value, low=found.low, high=found.high, n=problems * samples, problems=problems)


def difference(before: Accuracy, after: Accuracy) -> Estimate:
    """Newcombe's interval for after - before, from both Wilson intervals.

    It takes the two for independent. On the same problems they are not: the true interval is then narrower as a rule.
    """
    value = after.accuracy - before.accuracy
    down = math.hypot(after.accuracy - after.low, before.high - before.accuracy)
    up = math.hypot(after.high - after.accuracy, before.accuracy - before.low)
    return Estimate(value=value, low=value - down, high=value + up)


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's score interval for a share of `n` independent answers. Its ends are the p with
    |share - p| = z sqrt(p (1 - p) / n): sensible also at 0, at 1 and for small n."""
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(correct: int, n: int, k: int) -> float:
    """Probability that at least one of k answers, drawn without replacement from n of which `correct` are right, is
    right: 1 - C(n - correct, k) / C(n, k), the unbiased estimate of arXiv 2107.03374, equation 1.

    Needs 0 <= correct <= n and 1 <= k <= n.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def consensus(votes: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """cons@n of one problem: whether its most frequent answer is right.

    Right answers are one candidate, however they are written: they equal the same ground truth. An answer of None does
    not vote. Candidates that tie share the place, so c right ones among t give c / t: what drawing lots would give on
    average. 0 where nobody voted.

    Args:
        votes: what each response answers, equal for equal answers.
        correct: its verdict.
    """
    right = "right", None
    voting = [(vote, is_right) for vote, is_right in zip(votes, correct, strict=True) if vote is not None or is_right]
    counts = Counter(right if is_right else ("wrong", vote) for vote, is_right in voting)
    if not counts:
        return 0.0
    most = max(counts.values())
    return float(counts[right] == most) / sum(count == most for count in counts.values())


def mean_with_interval(values: np.ndarray, samples: int) -> Estimate:
    """Mean of one number a problem.

    Args:
        values: [P], in [0, 1]; at least one.
        samples: answers to each problem.
    """
    mean, problems = float(values.mean()), values.size
    variance = float(values.var(ddof=1)) / problems if problems > 1 else 0.0
    # All alike or one problem: the data say nothing about how alike the answers are. Assume: quite alike.
    independent = float(problems)
    if np.ptp(values) > 1e-12:  # the variance of equal numbers is not always 0
        independent = min(mean * (1 - mean) / variance, float(problems * samples))
    low, high = wilson(mean, independent)
    return Estimate(value=mean, low=low, high=high)


def sizes(n: int) -> list[int]:
    """The k of pass@k for n answers: powers of two, and n."""
    return sorted({*(2**power for power in range(n.bit_length()) if 2**power <= n), n})
