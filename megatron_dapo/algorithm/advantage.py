"""Advantages: how much better a response is than the others of its group, eq. 9 and its relatives.

    group_std                (R_i - mean_g) / (std_g + epsilon)          GRPO, DAPO eq. 9
    no_std                   R_i - mean_g                                Dr. GRPO (arXiv 2503.20783)
    rloo                     R_i - mean of the other G - 1               RLOO (arXiv 2402.14740)
    mini_batch_std           D = R_i - mean_g, then (D - mean D) / (std D + epsilon) over the responses of the
                             mini-batch                                  Magistral (arXiv 2506.10910)
    batch_std                D / (std D + epsilon) over all responses of the rollout step
                                                                         ScaleRL (arXiv 2510.13786)
    reinforce_pp_baseline    (D - mean D) / (std D + epsilon) over all response *tokens* of the rollout step, each with
                             its response's D                            REINFORCE++ baseline (arXiv 2501.03262)

mean_g and std_g are over the G responses of a prompt. The paper states neither epsilon nor the divisor of the standard
deviation: both are arguments. Every response enters mean and std, also one that is truncated and, under overlong
filtering, carries no loss: filtering takes a response out of the *gradient* (its token weights are 0), while its reward
still tells how hard the prompt is. All of it is computed before the mini-batch is cut, so no layout changes it.

Example, G = 4, one right: rewards (1, -1, -1, -1), mean -0.5, std 1 (ddof 1): group_std (1.5, -0.5, -0.5, -0.5),
which is no_std too; rloo (2, -2/3, -2/3, -2/3).
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Estimator = Literal["group_std", "no_std", "rloo", "mini_batch_std", "batch_std", "reinforce_pp_baseline"]


def group_advantages(
    rewards: Float[Tensor, "P G"], *, epsilon: float, ddof: int, estimator: Estimator = "group_std"
) -> Float[Tensor, "P G"]:
    """The part of the advantage that a group alone decides, for G responses to each of P prompts; without unit.

    A group without spread (all rewards equal) gets exactly 0: nothing can be learnt from comparing equals, and rounding
    in mean and std must not pass for a difference.

    Args:
        rewards: shaped rewards, eq. 7 + eq. 13.
        epsilon: added to the standard deviation.
        ddof: 1 divides the squared deviations by G - 1 (sample), 0 by G (population).
    """
    count = rewards.shape[1]
    deviation = rewards - rewards.sum(dim=1, keepdim=True) / count
    spread = rewards.amax(dim=1, keepdim=True) != rewards.amin(dim=1, keepdim=True)
    if estimator == "group_std":
        variance = deviation.square().sum(dim=1, keepdim=True) / max(count - ddof, 1)
        deviation = deviation / (variance.sqrt() + epsilon)
    elif estimator == "rloo":
        deviation = deviation * count / max(count - 1, 1)
    return torch.where(spread, deviation, 0.0)


def standardized(
    deviations: Float[Tensor, " R"], *, epsilon: float, ddof: int, counts: Int[Tensor, " R"] | None = None
) -> Float[Tensor, " R"]:
    """(D - mean D) / (std D + epsilon) over exactly the R responses given; all 0 if they are all equal.

    Args:
        deviations: `group_advantages` without a standard deviation.
        counts: how often each counts, for statistics over tokens: the response lengths. None: once; of whole groups
            the mean is then 0, and is not subtracted, so that a group without spread keeps an exact 0.
    """
    if deviations.numel() == 0 or bool((deviations == deviations[0]).all()):
        return torch.zeros_like(deviations)
    weight = torch.ones_like(deviations) if counts is None else counts.to(deviations.dtype)
    total = weight.sum()
    mean = (weight * deviations).sum() / total
    variance = (weight * (deviations - mean).square()).sum() / (total - ddof).clamp(min=1)
    return (deviations if counts is None else deviations - mean) / (variance.sqrt() + epsilon)


def step_advantages(
    rewards: Float[Tensor, "P G"], lengths: Int[Tensor, " R"], *, epsilon: float, ddof: int, estimator: Estimator
) -> Float[Tensor, " R"]:
    """The advantages of a rollout step's R = P G responses of these `lengths`, group after group. With `mini_batch_std`
    the last step, `standardized` over the mini-batch, is left to who knows the mini-batch."""
    advantages = group_advantages(rewards, epsilon=epsilon, ddof=ddof, estimator=estimator).flatten()
    if estimator == "batch_std":
        return standardized(advantages, epsilon=epsilon, ddof=ddof)
    if estimator == "reinforce_pp_baseline":
        return standardized(advantages, epsilon=epsilon, ddof=ddof, counts=lengths)
    return advantages
