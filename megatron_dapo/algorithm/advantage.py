"""Group-relative advantages, eq. 9.

    A_i = (R_i - mean(R_1..R_G)) / (std(R_1..R_G) + epsilon)

The paper states neither epsilon nor the divisor of the standard deviation: both are arguments. Every response of the
group enters mean and std, also one that is truncated and, under overlong filtering, carries no loss: filtering takes a
response out of the *gradient* (its token weights are 0), while its reward still tells how hard the prompt is. Only
responses that do not exist (aborted) are left out, by `valid`.

Example, G = 4, one right: rewards (1, -1, -1, -1), mean -0.5, std 1 (ddof 1): advantages (1.5, -0.5, -0.5, -0.5).
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def group_advantages(
    rewards: Float[Tensor, "P G"],
    *,
    epsilon: float,
    ddof: int,
    valid: Bool[Tensor, "P G"] | None = None,
) -> Float[Tensor, "P G"]:
    """Advantage of each of G responses to each of P prompts, without unit.

    A group without spread (all rewards equal) gets exactly 0: nothing can be learnt from comparing equals, and rounding
    in mean and std must not pass for a difference. So does a group with fewer than two valid responses.

    Args:
        rewards: shaped rewards, eq. 7 + eq. 13.
        epsilon: added to the standard deviation.
        ddof: 1 divides the squared deviations by G - 1 (sample), 0 by G (population).
        valid: False where there is no response; it gets advantage 0 and enters neither mean nor std. None: all valid.
    """
    present = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    count = present.sum(dim=1, keepdim=True)
    # `where`, not a product with the mask: a missing response may hold NaN, and 0 * NaN is NaN.
    known = torch.where(present, rewards, 0.0)
    deviation = torch.where(present, known - known.sum(dim=1, keepdim=True) / count.clamp(min=1), 0.0)
    variance = deviation.square().sum(dim=1, keepdim=True) / (count - ddof).clamp(min=1)
    highest = rewards.masked_fill(~present, -torch.inf).amax(dim=1, keepdim=True)
    lowest = rewards.masked_fill(~present, torch.inf).amin(dim=1, keepdim=True)
    return torch.where(present & (highest != lowest), deviation / (variance.sqrt() + epsilon), 0.0)
