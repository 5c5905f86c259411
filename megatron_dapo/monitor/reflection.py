"""Words of a response that look back or turn back (section 4.3 of the paper)."""

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


def reflection_metrics(texts: Sequence[str], correct: Sequence[bool]) -> dict[str, float]:
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
