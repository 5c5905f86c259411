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
vocabulary in blocks of columns, each of which gives the four numbers as if it were another rank's. Hidden states in
float32 and a weight in bfloat16 (`model.fp32_head`) are multiplied in float32, of which one block of the weight exists.

A piece is a rank's columns, or a block of them: `reduce_columns` gives its four numbers, `merge` makes those of one
piece out of several, `combine` log-prob and entropy of all ranks' pieces, `gradient_columns` is the way back.

T rows of logits, n of them wanted, V columns of the padded vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dapo.actor.device.weight_gradients import wgrad_gemm_accum_fp32

MIN_BLOCK = 128
"""Columns of the smallest block: below it matrix products lose their speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyShard:
    """The columns of the vocabulary that this rank's logits hold."""

    start: int
    """Token id of the first column."""

    size: int
    """Columns that are tokens. Those behind them only pad the vocabulary to a multiple of the tensor-parallel size."""

    group: dist.ProcessGroup | None = None
    """The tensor-parallel ranks; None: the whole vocabulary is here."""


Options = tuple[VocabularyShard, float, int]
"""The shard, the temperature, and how many rows or columns are worked on at a time."""


def token_log_probs(
    logits: Tensor, rows: Tensor, targets: Tensor, shard: VocabularyShard, *, temperature: float = 1.0, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, each [n], float32 (float64 for float64 logits), the same on every tensor-parallel rank.

    Args:
        logits: [T, V / tp] in any floating type; not changed.
        rows: int64 [n], no row twice. Only these are brought to float32.
        targets: int64 [n], token ids of the whole vocabulary.
        temperature: the distribution is softmax(logits / temperature).
        chunk: rows in float32 at a time; 0: as many as suit the device.
    """
    chunk = chunk or max(1, piece_elements(logits.device) // max(1, shard.size))
    return _TokenLogProbs.apply(logits, rows, targets, (shard, temperature, chunk))


def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float = 1.0,
    block: int = 0,
) -> tuple[Tensor, Tensor]:
    """`token_log_probs` of the logits hidden @ weight.T, of which only a block of columns ever exists.

    Backward computes them again: one matrix product more, in exchange for logits and their gradient. Each rank's
    gradient of `hidden` is that of its own columns: the sum over tensor-parallel ranks is the caller's.

    Args:
        hidden: [T, h], the same on every tensor-parallel rank.
        weight: [V / tp, h] of this rank. The products are made in the type of `hidden`; only a block of the weight, and
            of its gradient, is ever converted.
        rows, targets, temperature: as in `token_log_probs`.
        block: columns at a time; 0: as many as suit the device.
    """
    block = block or max(MIN_BLOCK, piece_elements(hidden.device) // max(1, len(rows)))
    return _LinearTokenLogProbs.apply(hidden, weight, rows, targets, (shard, temperature, block))


class GatherOverContext(torch.autograd.Function):
    """All `total` columns of a micro-batch on every context-parallel rank, from those that each rank has predicted.

    Each rank then computes the loss of whole responses, the same on all of them. Backward hands each rank the gradient
    of its own columns: added up over ranks, as the gradients of the weights are, they are the loss's gradient once.

    values: [k, n] of this rank; places: int64 [n], which columns of the result they are.
    """

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
    def forward(ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        shard, temperature, chunk = options
        piece = torch.empty((4, len(rows)), dtype=work_dtype(logits.dtype), device=logits.device)
        for part in _parts(len(rows), chunk):
            columns = _columns(logits, rows[part], shard)
            piece[:, part] = reduce_columns(columns, targets[part] - shard.start, temperature)
        return _results(ctx, piece, options, logits, rows, targets)

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        (logits, rows, targets, *statistics), (shard, temperature, chunk) = ctx.saved_tensors, ctx.options
        down, spread = _scaled(grad_log_probs, grad_entropy, statistics[0], temperature)
        # Rows that were not asked for, and padding columns, keep the zeros.
        grad_logits = torch.zeros_like(logits)
        for part in _parts(len(rows), chunk):
            columns, own = _columns(logits, rows[part], shard), targets[part] - shard.start
            own_statistics = [each[part] for each in statistics]
            own_spread = None if spread is None else spread[part]
            grad = gradient_columns(columns, own, own_statistics, down[part], own_spread, temperature)
            grad_logits[:, : shard.size].index_copy_(0, rows[part], grad.to(logits.dtype))
        return grad_logits, None, None, None


class _LinearTokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, options: Options
    ) -> tuple[Tensor, Tensor]:
        shard, temperature, block = options
        dtype, wanted = work_dtype(hidden.dtype), hidden.index_select(0, rows)
        pieces = []
        for part in _parts(shard.size, block):
            columns = (wanted @ weight[part].to(wanted.dtype).T).to(dtype)
            pieces.append(reduce_columns(columns, targets - shard.start - part.start, temperature))
        return _results(ctx, merge(torch.stack(pieces), temperature), options, hidden, weight, rows, targets)

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden, weight, rows, targets, *statistics = ctx.saved_tensors
        shard, temperature, block = ctx.options
        down, spread = _scaled(grad_log_probs, grad_entropy, statistics[0], temperature)
        wanted = hidden.index_select(0, rows)
        # Summed over blocks, so in the type that the work is done in; a block's rows of `grad_weight` are whole.
        grad_wanted = torch.zeros(wanted.shape, dtype=down.dtype, device=wanted.device)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # frozen where there are adapters
        # Megatron's buffer for the gradients of all micro-batches, in float32, takes what rounding would spoil.
        summed = grad_weight is not None and hasattr(weight, "main_grad")
        if summed:
            weight.grad_added_to_main_grad = True
        for part in _parts(shard.size, block):
            rows_of_weight = weight[part].to(wanted.dtype)
            own, given = targets - shard.start - part.start, (statistics, down, spread, temperature)
            grad = gradient_columns((wanted @ rows_of_weight.T).to(down.dtype), own, *given).to(wanted.dtype)
            grad_wanted += grad @ rows_of_weight
            if summed:
                wgrad_gemm_accum_fp32(wanted, grad, weight.main_grad[part])
            elif grad_weight is not None:
                grad_weight[part] = grad.T @ wanted
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_wanted.to(hidden.dtype))
        return grad_hidden, grad_weight, None, None, None


def _results(ctx: Any, piece: Tensor, options: Options, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies; what backward needs is saved."""
    shard, temperature, _ = options
    maximum, log_total, log_probs, entropy = combine(piece, shard.group, temperature)
    ctx.save_for_backward(*inputs, maximum, log_total, entropy)
    ctx.options = options
    ctx.set_materialize_grads(False)
    return log_probs, entropy


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


def piece_elements(device: torch.device) -> int:
    """How many logits to calculate with at a time: on the CPU what its cache keeps, on a GPU what fills it."""
    return 2**26 if device.type == "cuda" else 2**19


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that logits of `dtype` are calculated with."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _own_targets(targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Whether each target (counted from the shard's first column) is in the shard, and a column that exists anyway."""
    ours = (targets >= 0) & (targets < size)
    return ours, torch.where(ours, targets, 0)


def reduce_columns(columns: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """[4, rows]: the largest logit, sum of exp(x), sum of exp(x) * x, the target's logit or 0. x is relative to the
    largest. Changes `columns`."""
    ours, column = _own_targets(targets, columns.shape[1])
    target, maximum = columns.gather(1, column[:, None]).squeeze(1) * ours, columns.amax(dim=1)
    x = _relative(columns, maximum, temperature)
    exp = x.exp()
    return torch.stack([maximum, exp.sum(dim=1), exp.mul_(x).sum(dim=1), target])


def merge(pieces: Tensor, temperature: float) -> Tensor:
    """[4, n] of several pieces together, from [pieces, 4, n]."""
    maxima, sums, weighted, targets = pieces.unbind(1)
    maximum = maxima.amax(dim=0)
    shift = (maxima - maximum) / temperature
    scale = shift.exp()
    return torch.stack([maximum, (scale * sums).sum(0), (scale * (weighted + shift * sums)).sum(0), targets.sum(0)])


def combine(
    piece: Tensor, group: dist.ProcessGroup | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest logit M, log sum exp((logit - M) / temperature), log-prob and entropy, each [n], from every rank's
    [4, n]; the same on all of them."""
    ranks, gathered = 1 if group is None else group.size(), piece[None]
    if ranks > 1:
        gathered = piece.new_empty((ranks, *piece.shape))
        dist.all_gather_into_tensor(gathered.view(-1), piece.view(-1), group=group)
    maximum, total, weighted, target = merge(gathered, temperature).unbind()
    log_total = total.log()
    return maximum, log_total, (target - maximum) / temperature - log_total, log_total - weighted / total


def gradient_columns(
    columns: Tensor, targets: Tensor, statistics: list[Tensor], down: Tensor, spread: Tensor | None, temperature: float
) -> Tensor:
    """Gradient of the loss with respect to a piece's logits, [rows, columns]. Changes `columns`.

    Args:
        columns: the piece's logits.
        targets: int64 [rows], counted from the piece's first column; most lie in other pieces.
        statistics: largest logit, log sum exp and entropy over the whole vocabulary, [rows] each.
        down, spread: d loss / d log-prob and d loss / d entropy, divided by the temperature, [rows]; None: 0.
    """
    maximum, log_total, entropy = (statistic[:, None] for statistic in statistics)
    log_pi = _relative(columns, maximum[:, 0], temperature).sub_(log_total)
    factor = -down[:, None]
    if spread is not None:
        factor = (log_pi + entropy).mul_(-spread[:, None]).sub_(down[:, None])
    grad = log_pi.exp_().mul_(factor)
    ours, column = _own_targets(targets, columns.shape[1])
    return grad.scatter_add_(1, column[:, None], (down * ours)[:, None])


def _relative(columns: Tensor, maximum: Tensor, temperature: float) -> Tensor:
    """x minus the largest x: (logit - maximum) / temperature, in place. The difference first: it loses no digits."""
    columns.sub_(maximum[:, None])
    return columns if temperature == 1.0 else columns.div_(temperature)
