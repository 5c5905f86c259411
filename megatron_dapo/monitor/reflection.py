"""Words of a response that look back or turn back, and how they go with being right (section 4.3 of the paper)."""

import math
import re
from collections.abc import Sequence

import numpy as np

REFLECTION = re.compile(
    r"\b(wait|re-?check|re-?examine|re-?consider|double-check|let me (?:verify|check)|mistake|on second thought)\b",
    re.I,
)
"""The response looks at what it wrote."""

BACKTRACKING = re.compile(
    r"\b(on second thought|start over|go back|try again|redo|re-?do this|that(?:'s| is) (?:wrong|not right|incorrect)"
    r"|mistake|another approach|different approach)\b",
    re.I,
)
"""The response gives up what it wrote."""


def wording_metrics(texts: Sequence[str], correct: Sequence[bool]) -> dict[str, float]:
    """Share of responses with such words and, where there are any, the accuracy of those that have them.

    Args:
        texts: [R] responses.
        correct: [R] whether each is right.
    """
    metrics: dict[str, float] = {}
    for name, pattern in (("reflection", REFLECTION), ("backtracking", BACKTRACKING)):
        hits = np.array([bool(pattern.search(text)) for text in texts])
        metrics[f"{name}_rate"] = float(hits.mean())
        if hits.any():
            metrics[f"{name}_accuracy"] = float(np.asarray(correct, dtype=float)[hits].mean())
    return metrics


def correlation(rates: Sequence[float], among: Sequence[float], accuracies: Sequence[float]) -> float | None:
    """Correlation of "has the word" with "is right" inside rollout steps, over all steps.

    Each step's 2 x 2 table follows from three shares, so nothing but the metrics is needed. Covariances and variances
    are averaged over steps, not the responses pooled: that both rise in the course of training counts for nothing.

    Args:
        rates: [S] share of responses with the word.
        among: [S] share of right ones among those.
        accuracies: [S] share of right ones among all.

    Returns:
        phi in [-1, 1]; None where one of the two never varies.
    """
    has, right_if, right = (np.asarray(values, dtype=float) for values in (rates, among, accuracies))
    covariance = has * right_if - has * right
    spread = math.sqrt(float((has * (1 - has)).sum()) * float((right * (1 - right)).sum()))
    return float(covariance.sum()) / spread if spread > 1e-12 else None
