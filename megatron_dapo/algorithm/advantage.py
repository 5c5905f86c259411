"""Group-relative advantages, eq. 9.

    A_i = (R_i - mean(R_1..R_G)) / (std(R_1..R_G) + epsilon)

The paper states neither epsilon nor the divisor of the standard deviation: both are arguments. Every response of the
group enters mean and std, also one that is truncated and, under overlong filtering, carries no loss: filtering takes a
response out of the *gradient* (its token weights are 0), while its reward still tells how hard the prompt is.

Example, G = 4, one right: rewards (1, -1, -1, -1), mean -0.5, std 1 (ddof 1): advantages (1.5, -0.5, -0.5, -0.5).
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

import torch
from jaxtyping import Float
from torch import Tensor


def group_advantages(rewards: Float[Tensor, "P G"], *, epsilon: float, ddof: int) -> Float[Tensor, "P G"]:
    """Advantage of each of G responses to each of P prompts, without unit.

    A group without spread (all rewards equal) gets exactly 0: nothing can be learnt from comparing equals, and rounding
    in mean and std must not pass for a difference.

    Args:
        rewards: shaped rewards, eq. 7 + eq. 13.
        epsilon: added to the standard deviation.
        ddof: 1 divides the squared deviations by G - 1 (sample), 0 by G (population).
    """
    count = rewards.shape[1]
    deviation = rewards - rewards.sum(dim=1, keepdim=True) / count
    variance = deviation.square().sum(dim=1, keepdim=True) / max(count - ddof, 1)
    spread = rewards.amax(dim=1, keepdim=True) != rewards.amin(dim=1, keepdim=True)
    return torch.where(spread, deviation / (variance.sqrt() + epsilon), 0.0)
