"""avg@k, pass@k and cons@k of problems that were answered n times each, with 95% intervals over the problems.

Each of them is the mean over problems of one number a problem. Problems are the unit of chance: the interval comes from
drawing problems anew, with replacement (percentile bootstrap, seeded). Where every problem has the same number such
draws show no spread; for 0 and 1 Wilson's interval of as many independent problems then stands in, else it is a point.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dapo.monitor.statistics import wilson_accuracy

EVALUATIONS = "evaluations"
"""Folder of a run's held-out results, one folder each: `before`, `step12`, `after`, those of `megatron-dapo eval`."""

RESAMPLES = 10_000
_CHUNK = 500
"""Resamples held at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over problems with its 95% interval, all in [0, 1]."""

    value: float
    low: float
    high: float


def pass_at_k(correct: int, n: int, k: int) -> float:
    """Probability that at least one of k answers, drawn without replacement from n of which `correct` are right, is
    right: 1 - C(n - correct, k) / C(n, k), the unbiased estimate of arXiv 2107.03374, equation 1.

    Raises:
        ValueError: not 0 <= correct <= n, or not 1 <= k <= n.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {correct} right among {n} answers: needs 1 <= k <= n and 0 <= right <= n")
    missed = 1.0
    for drawn in range(k):
        missed *= max(0, n - correct - drawn) / (n - drawn)
    return 1.0 - missed


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
    counts = Counter(
        right if is_right else ("wrong", vote)
        for vote, is_right in zip(votes, correct, strict=True)
        if vote is not None or is_right
    )
    if not counts:
        return 0.0
    most = max(counts.values())
    return float(counts[right] == most) / sum(count == most for count in counts.values())


def mean_with_interval(values: np.ndarray, *, seed: int = 0) -> Estimate:
    """Mean of one number a problem.

    Args:
        values: [P], in [0, 1].

    Raises:
        ValueError: there are no problems.
    """
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"values of shape {list(values.shape)}: one number a problem is needed")
    mean = float(values.mean())
    if (values == values[0]).all():
        if values[0] in (0, 1):
            wilson = wilson_accuracy(int(values.sum()), values.size)
            return Estimate(value=mean, low=wilson.low, high=wilson.high)
        return Estimate(value=mean, low=mean, high=mean)
    random = np.random.default_rng(seed)
    chunks = range(RESAMPLES // _CHUNK)
    means = np.concatenate(
        [values[random.integers(0, values.size, (_CHUNK, values.size))].mean(axis=1) for _ in chunks]
    )
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(value=mean, low=float(low), high=float(high))


def sizes(n: int) -> list[int]:
    """The k of pass@k for n answers: powers of two, and n."""
    return sorted({*(2**power for power in range(n.bit_length()) if 2**power <= n), n})
