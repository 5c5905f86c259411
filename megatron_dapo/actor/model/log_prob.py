"""Log-prob of the sampled token and entropy of its distribution, from logits that are split over the vocabulary.

With x = logits / temperature of one position, over the whole vocabulary:

    log Z = log sum exp(x)          log pi(y) = x_y - log Z                   H = log Z - sum(pi * x)
                                    d log pi(y) / dx_j = [j = y] - pi_j       dH / dx_j = -pi_j (log pi_j + H)

Every tensor-parallel rank holds V/tp columns. It reduces its columns to four numbers a position (maximum, sum of exp,
sum of exp * x, the target's x if it has it); these are gathered in one collective for all positions, and each rank
combines them in the same order. Backward needs none: log Z and H are saved. All x are taken relative to the largest,
so that logits of any size keep their digits.

Low-precision logits are saved as they are. The float32 work is done on a few rows at a time, forward and again
backward: at 152 000 columns a full micro-batch in float32 would be many times the activations.

`linear_token_log_probs` holds no logits at all: it takes the output layer's input and weight, and goes through the
vocabulary in blocks of columns, each of which gives the four numbers as if it were another rank's.

T rows of logits, n of them wanted, V columns of the padded vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.actor.model.vocab_parallel import (
    VocabularyShard,
    combine,
    gradient_columns,
    merge,
    piece_elements,
    reduce_columns,
    work_dtype,
)

MIN_BLOCK = 128
"""Columns of the smallest block: below it matrix products lose their speed."""


def token_log_probs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, each [n], float32 (float64 for float64 logits), the same on every tensor-parallel rank.

    Args:
        logits: [T, V / tp] in any floating type; not changed.
        rows: int64 [n], no row twice. Only these are brought to float32.
        targets: int64 [n], token ids of the whole vocabulary.
        temperature: the distribution is softmax(logits / temperature).
        chunk: rows in float32 at a time; None: as many as suit the device.
        entropy_gradient: whether gradients flow back from the entropy; False saves a little.
    """
    chunk = chunk or max(1, piece_elements(logits.device) // max(1, shard.size))
    log_probs, entropy = _TokenLogProbs.apply(logits, rows, targets, shard, temperature, chunk)
    return log_probs, entropy if entropy_gradient else entropy.detach()


def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float = 1.0,
    block: int | None = None,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """`token_log_probs` of the logits hidden @ weight.T, of which only a block of columns ever exists.

    Backward computes them again: one matrix product more, in exchange for logits and their gradient. Each rank's
    gradient of `hidden` is that of its own columns: the sum over tensor-parallel ranks is the caller's.

    Args:
        hidden: [T, h], the same on every tensor-parallel rank.
        weight: [V / tp, h] of this rank, of the type of `hidden`.
        rows, targets, temperature, entropy_gradient: as in `token_log_probs`.
        block: columns at a time; None: as many as suit the device.
    """
    block = block or max(MIN_BLOCK, piece_elements(hidden.device) // max(1, len(rows)))
    log_probs, entropy = _LinearTokenLogProbs.apply(hidden, weight, rows, targets, shard, temperature, block)
    return log_probs, entropy if entropy_gradient else entropy.detach()


def gather_over_context(values: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """All `total` columns of a micro-batch on every context-parallel rank, from those that each rank has predicted.

    Each rank then computes the loss of whole responses, the same on all of them. Backward hands each rank the gradient
    of its own columns: added up over ranks, as the gradients of the weights are, they are the loss's gradient once.

    Args:
        values: [k, n] of this rank.
        places: int64 [n], which columns of the result they are.
    """
    return _GatherOverContext.apply(values, places, total, group)


class _GatherOverContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros((len(values), total)).index_copy_(1, places, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(1, places), None, None, None


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        shard: VocabularyShard,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        piece = torch.empty((4, len(rows)), dtype=work_dtype(logits.dtype), device=logits.device)
        for part in _parts(len(rows), chunk):
            columns = _columns(logits, rows[part], shard)
            piece[:, part] = reduce_columns(columns, targets[part] - shard.start, temperature)
        maximum, log_total, log_probs, entropy = combine(piece, shard.group, temperature)
        ctx.save_for_backward(logits, rows, targets, maximum, log_total, entropy)
        ctx.options = (shard, temperature, chunk)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits, rows, targets, *statistics = ctx.saved_tensors
        shard, temperature, chunk = ctx.options
        down, spread = _scaled(grad_log_probs, grad_entropy, statistics[0], temperature)
        # Rows that were not asked for, and padding columns, keep the zeros.
        grad_logits = torch.zeros_like(logits)
        for part in _parts(len(rows), chunk):
            grad = gradient_columns(
                _columns(logits, rows[part], shard),
                targets[part] - shard.start,
                [statistic[part] for statistic in statistics],
                down[part],
                None if spread is None else spread[part],
                temperature,
            )
            grad_logits[:, : shard.size].index_copy_(0, rows[part], grad.to(logits.dtype))
        return grad_logits, None, None, None, None, None


class _LinearTokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor,
        targets: Tensor,
        shard: VocabularyShard,
        temperature: float,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        dtype, wanted = work_dtype(hidden.dtype), hidden.index_select(0, rows)
        # The block of no columns stands for a rank whose columns are all padding.
        pieces = [
            reduce_columns((wanted @ weight[part].T).to(dtype), targets - shard.start - part.start, temperature)
            for part in _parts(shard.size, block) or [slice(0, 0)]
        ]
        maximum, log_total, log_probs, entropy = combine(
            merge(torch.stack(pieces), temperature), shard.group, temperature
        )
        ctx.save_for_backward(hidden, weight, rows, targets, maximum, log_total, entropy)
        ctx.options = (shard, temperature, block)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        hidden, weight, rows, targets, *statistics = ctx.saved_tensors
        shard, temperature, block = ctx.options
        down, spread = _scaled(grad_log_probs, grad_entropy, statistics[0], temperature)
        wanted = hidden.index_select(0, rows)
        # Summed over blocks, so in the type that the work is done in; a block's rows of `grad_weight` are whole.
        grad_wanted = torch.zeros(wanted.shape, dtype=down.dtype, device=wanted.device)
        grad_weight = torch.zeros_like(weight)
        for part in _parts(shard.size, block):
            grad = gradient_columns(
                (wanted @ weight[part].T).to(down.dtype),
                targets - shard.start - part.start,
                statistics,
                down,
                spread,
                temperature,
            ).to(weight.dtype)
            grad_wanted += grad @ weight[part]
            torch.mm(grad.T, wanted, out=grad_weight[part])
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_wanted.to(hidden.dtype))
        return grad_hidden, grad_weight, None, None, None, None, None


def _scaled(
    grad_log_probs: Tensor | None, grad_entropy: Tensor | None, like: Tensor, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """d loss / d logits = d loss / d x / temperature: divided here, on [n], instead of on every column."""
    down = torch.zeros_like(like) if grad_log_probs is None else grad_log_probs / temperature
    return down, None if grad_entropy is None else grad_entropy / temperature


def _parts(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _columns(logits: Tensor, rows: Tensor, shard: VocabularyShard) -> Tensor:
    """Some rows of the logits, [rows, shard.size], in the type to calculate in: a new tensor that may be changed."""
    # `to` copies unless the type is the same already; then index_select made the copy.
    return logits.index_select(0, rows)[:, : shard.size].to(work_dtype(logits.dtype))
