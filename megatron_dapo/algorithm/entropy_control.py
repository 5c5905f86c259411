"""Adaptive entropy control (Skywork-OR1, arXiv 2505.22312).

    alpha_k = c_k if e_k <= target else 0        weight of the entropy bonus in step k
    c_k+1   = c_k + change if e_k < target else c_k - change, within [0, maximum]

e_k is the entropy of the step's batch under the weights that drew it. Below the target the bonus grows step by step;
above it there is none, so that it never drives the entropy up without bound.
"""


def controlled(
    coefficient: float, entropy: float, *, target: float, change: float, maximum: float
) -> tuple[float, float]:
    """alpha_k and c_k+1 from c_k and e_k, which is in nats.

    Example, target 0.2, change 0.001: (0.002, 0.15) gives (0.002, 0.003), (0.002, 0.25) gives (0, 0.001).
    """
    moved = coefficient + (change if entropy < target else -change)
    return (coefficient if entropy <= target else 0.0), min(max(moved, 0.0), maximum)
