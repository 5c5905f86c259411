"""KL divergence to a reference, estimated from the sampled tokens. DAPO has no such term (section 2.3): off by default.

With d = log pi(y) - log ref(y) of a token or of a whole response, y drawn from pi (Schulman's k1, k2, k3):

    k1 = d                   k2 = d^2 / 2                    k3 = exp(-d) - 1 + d
    k1' = 1                  k2' = d                         k3' = 1 - exp(-d)

As *values* k1 and k3 are unbiased and k2 is not. As *losses* it is the derivative that counts, and E[k' * grad log pi]
is zero for k1 (it regularises nothing), the gradient of KL(pi || ref) for k2 on whole responses, and that of
KL(ref || pi) for k3 on whole responses. Per token, each of them leaves out what a token does to later ones.

Example: log pi = -1.0, log ref = -1.5, so d = 0.5: k1 = 0.5, k2 = 0.125, k3 = 0.1065.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

EXPONENT_BOUND = 20.0
"""Largest |log ratio| put into exp: the square of e^20 = 4.9e8 still fits float32. No healthy run comes near."""


def kl_estimate(
    log_probs: Float[Tensor, "*shape"], reference: Float[Tensor, "*shape"], estimator: Estimator
) -> Float[Tensor, "*shape"]:
    """The estimator at each d = log_probs - reference, in nats; differentiable in `log_probs`."""
    return _value(log_probs - reference, estimator)


def sequence_kl_estimate(
    log_probs: Float[Tensor, " T"],
    reference: Float[Tensor, " T"],
    estimator: Estimator,
    *,
    sequence_index: Int[Tensor, " T"],
    sequence_lengths: Int[Tensor, " S"],
) -> Float[Tensor, " T"]:
    """The estimator at each whole response's d = sum of its tokens' d, divided by its length and laid on its tokens.

    Every aggregation weighs the tokens of a response alike (w). Their weighted sum is then w * k(d), with gradient
    w * k'(d) in each of the response's log-probs; with k1 it equals the token version.

    Args:
        sequence_index: which of the S responses a token belongs to, 0 <= index < S. Responses are whole: a micro-batch
            never holds part of one.
        sequence_lengths: tokens of each response.

    Example: tokens with d = 0.5 and 0.3, k2: d = 0.8, k2 = 0.32, so 0.16 on each token; each one's gradient is 0.8 w.
    """
    difference = (log_probs - reference).double()  # so that the sum hardly depends on the order of its tokens
    totals = difference.new_zeros(sequence_lengths.shape[0]).index_add(0, sequence_index, difference)
    return (_value(totals, estimator) / sequence_lengths.clamp(min=1))[sequence_index].to(log_probs.dtype)


def _value(difference: Tensor, estimator: Estimator) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    # expm1 keeps k3 exact (and not negative) near 0, where exp(-d) - 1 would cancel.
    return torch.expm1(-(held := difference.clamp(min=-EXPONENT_BOUND))) + held
