"""From token losses to one number: the denominator of eq. 8 as a weight of each token.

    loss of the mini-batch = sum over its N tokens of weight_t * token_loss_t

The weights are computed once, from the whole mini-batch. Micro-batches, packing and ranks then only sum, so none of
them changes the gradient. A response that carries no loss (masked) weighs 0 and is in no denominator, as if it were not
there; so does one without tokens.

With R responses of |o_i| tokens, P prompts p of T_p tokens in their responses, and micro-batches m of R_m responses and
T_m tokens:

    token_mean               1 / sum |o_i|             every token alike: eq. 8 over the mini-batch (DAPO, section 3.3)
    prompt_token_mean        1 / (P T_p)               every prompt alike: eq. 8 literally, expectation over prompts
    sequence_mean            1 / (R |o_i|)             every response alike (GRPO)
    sequence_sum_constant    1 / (R constant_length)   no division by length (Dr. GRPO); does not sum to 1
    verl_legacy              (R_m / R) / T_m           means of micro-batches, weighted by their responses: depends on
                                                       the packing. As the reproduction on verl ran (its dynamic batch
                                                       size scales a micro-batch's mean by its share of the responses)

Example: two responses of 1 and 3 tokens to one prompt. token_mean: 1/4 each. sequence_mean: 1/2, then 1/6 each. Alone
in a micro-batch each, verl_legacy: 1/2, then 1/6 each; together in one: 1/4 each. Lengths 100 | 10, 10, 10 in two
micro-batches: 0.0025 and 0.025.
"""

# ruff: noqa: F722  (the strings in annotations are jaxtyping shapes)

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Aggregation = Literal["token_mean", "prompt_token_mean", "sequence_mean", "sequence_sum_constant", "verl_legacy"]


def token_weights(
    response_lengths: Int[Tensor, " R"],
    group_index: Int[Tensor, " R"],
    aggregation: Aggregation,
    *,
    mask: Bool[Tensor, " R"] | None = None,
    constant_length: int | None = None,
    micro_batch_index: Int[Tensor, " R"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " N"]:
    """Weight of each of the N = sum(response_lengths) tokens, response after response; computed in float64.

    Every token of a response has the same weight. If no response carries loss, all weights are 0.

    Args:
        response_lengths: response tokens of the whole mini-batch's responses.
        group_index: which prompt each response answers; any integers, equal for equal prompts.
        mask: False where a response carries no loss (overlong filtering: it was truncated). None: all carry loss.
        constant_length: divisor of `sequence_sum_constant`, in tokens.
        micro_batch_index: which micro-batch holds each response, of all ranks' micro-batches; for `verl_legacy`.

    Raises:
        ValueError: `constant_length` or `micro_batch_index` is missing for the aggregation that reads it.
    """
    carries = response_lengths > 0
    if mask is not None:
        carries = carries & mask
    lengths = torch.where(carries, response_lengths, 0).to(torch.float64)
    if aggregation == "token_mean":
        divisor = lengths.sum().expand_as(lengths)
    elif aggregation == "prompt_token_mean":
        classes, position = torch.unique(group_index, return_inverse=True)
        tokens = lengths.new_zeros(classes.shape[0]).index_add(0, position, lengths)
        divisor = (tokens > 0).sum() * tokens[position]
    elif aggregation == "sequence_mean":
        divisor = carries.sum() * lengths
    elif aggregation == "sequence_sum_constant":
        if constant_length is None or constant_length <= 0:
            raise ValueError(f"sequence_sum_constant: needs constant_length > 0 tokens, got {constant_length}")
        divisor = (carries.sum() * constant_length).to(torch.float64).expand_as(lengths)
    else:
        if micro_batch_index is None:
            raise ValueError("verl_legacy: weighs the means of micro-batches, so it needs micro_batch_index")
        position = torch.unique(micro_batch_index, return_inverse=True)[1]
        none = torch.zeros_like(lengths)
        tokens, responses = (none.index_add(0, position, each)[position] for each in (lengths, carries.double()))
        divisor = carries.sum() * tokens / responses
    return torch.where(carries, 1.0 / divisor, 0.0).repeat_interleave(response_lengths).to(dtype)


def kl_scale(
    weights: Float[Tensor, " N"],
    response_lengths: Int[Tensor, " R"],
    aggregation: Literal["response_mean", "response_sum"],
    *,
    mask: Bool[Tensor, " R"],
) -> Float[Tensor, " N"]:
    """Weight of a token's KL over its weight in the policy loss, for the KL terms that are averaged in their own way:

        response_mean    over the tokens of each response, then over responses (GRPO, arXiv 2402.03300 eq. 3)
        response_sum     added up over each response, then the mean over responses

    Args:
        weights: `token_weights` of the same responses and mask; 0 where no loss is carried, which gives 0 here.
    """
    own: Aggregation = "sequence_mean" if aggregation == "response_mean" else "sequence_sum_constant"
    apart = torch.zeros_like(response_lengths)
    of_kl = token_weights(response_lengths, apart, own, mask=mask, constant_length=1, dtype=torch.float64)
    return torch.where(weights != 0, of_kl / weights.double(), 0.0).to(weights.dtype)
