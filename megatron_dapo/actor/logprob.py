"""Log-prob of the sampled token and entropy of its distribution, from logits that are split over the vocabulary.

With x = logits / temperature of one position, over the whole vocabulary:

    log Z = log sum exp(x)          log pi(y) = x_y - log Z                   H = log Z - sum(pi * x)
                                    d log pi(y) / dx_j = [j = y] - pi_j       dH / dx_j = -pi_j (log pi_j + H)

Every tensor-parallel rank holds V/tp columns. It reduces its columns to four numbers a position (maximum, sum of exp,
sum of exp * x, the target's x if it has it); these are gathered in one collective for all positions, and each rank
combines them in the same order. Backward needs none: log Z and H are saved. All x are taken relative to the largest,
so that logits of any size keep their digits.

Low-precision logits are saved as they are. The float32 work is done on `chunk` rows at a time, forward and again
backward: at 152 000 columns a full micro-batch in float32 would be many times the activations.

T rows of logits, n of them wanted, V columns of the padded vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_EMPTY_MAXIMUM = -1e30
"""The maximum over no columns: exp(this - any maximum) is 0, and so is 0 times it, which -inf would not give."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyShard:
    """The columns of the vocabulary that this rank's logits hold."""

    start: int
    """Token id of the first column."""

    size: int
    """Columns that are tokens. Those behind them only pad the vocabulary to a multiple of the tensor-parallel size."""

    group: dist.ProcessGroup | None = None
    """The tensor-parallel ranks; None: the whole vocabulary is here."""

    @classmethod
    def of(cls, *, vocabulary: int, columns: int, rank: int, group: dist.ProcessGroup | None) -> "VocabularyShard":
        """Shard `rank` of a vocabulary of `vocabulary` tokens when each rank holds `columns`, padding included."""
        start = rank * columns
        return cls(start=start, size=max(0, min(columns, vocabulary - start)), group=group)


def token_log_probs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, each [n], float32 (float64 for float64 logits), the same on every tensor-parallel rank.

    Args:
        logits: [T, V / tp] in any floating type; not changed.
        rows: int64 [n], no row twice. Only these are brought to float32.
        targets: int64 [n], token ids of the whole vocabulary.
        temperature: the distribution is softmax(logits / temperature).
        chunk: rows in float32 at a time.
        entropy_gradient: whether gradients flow back from the entropy; False saves a little.
    """
    log_probs, entropy = _TokenLogProbs.apply(logits, rows, targets, shard, temperature, chunk)
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
        work_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        partial = torch.empty((4, len(rows)), dtype=work_dtype, device=logits.device)
        for part in _chunks(len(rows), chunk):
            columns = _columns(logits, rows[part], shard, work_dtype)
            partial[:, part] = _reduce_columns(columns, targets[part] - shard.start, temperature)
        maximum, log_total, log_probs, entropy = _combine(_gather(partial, shard.group), temperature)
        ctx.save_for_backward(logits, rows, targets, maximum, log_total, entropy)
        ctx.options = (shard, temperature, chunk)
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits, rows, targets, maximum, log_total, entropy = ctx.saved_tensors
        shard, temperature, chunk = ctx.options
        # d loss / d logits = d loss / d x / temperature: divided here, on [n], instead of on every column.
        down = torch.zeros_like(log_total) if grad_log_probs is None else grad_log_probs / temperature
        spread = None if grad_entropy is None else grad_entropy / temperature
        # Rows that were not asked for, and padding columns, keep the zeros.
        grad_logits = torch.zeros_like(logits)
        for part in _chunks(len(rows), chunk):
            columns = _columns(logits, rows[part], shard, log_total.dtype)
            log_pi = _relative(columns, maximum[part], temperature).sub_(log_total[part, None])
            if spread is None:
                grad = log_pi.exp_().mul_(-down[part, None])
            else:
                factor = (log_pi + entropy[part, None]).mul_(-spread[part, None]).sub_(down[part, None])
                grad = log_pi.exp_().mul_(factor)
            if shard.size:
                ours, column = _own_targets(targets[part] - shard.start, shard.size)
                grad.scatter_add_(1, column[:, None], (down[part] * ours)[:, None])
            grad_logits[:, : shard.size].index_copy_(0, rows[part], grad.to(logits.dtype))
        return grad_logits, None, None, None, None, None


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _columns(logits: Tensor, rows: Tensor, shard: VocabularyShard, dtype: torch.dtype) -> Tensor:
    """Some rows of the logits, [rows, shard.size], in the type to calculate in: a new tensor that may be changed."""
    # `to` copies unless the type is the same already; then index_select made the copy.
    return logits.index_select(0, rows)[:, : shard.size].to(dtype)


def _relative(columns: Tensor, maximum: Tensor, temperature: float) -> Tensor:
    """x minus the largest x: (logit - maximum) / temperature, in place. The difference first: it loses no digits."""
    columns.sub_(maximum[:, None])
    return columns if temperature == 1.0 else columns.div_(temperature)


def _own_targets(targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Whether each target (counted from the shard's first column) is in the shard, and a column that exists anyway."""
    ours = (targets >= 0) & (targets < size)
    return ours, torch.where(ours, targets, 0)


def _reduce_columns(columns: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """[4, rows]: the largest logit, sum of exp(x), sum of exp(x) * x, the target's logit or 0. x is relative to the
    largest. Changes `columns`."""
    if columns.shape[1] == 0:
        zero = columns.new_zeros(len(columns))
        return torch.stack([torch.full_like(zero, _EMPTY_MAXIMUM), zero, zero, zero])
    ours, column = _own_targets(targets, columns.shape[1])
    target = columns.gather(1, column[:, None]).squeeze(1) * ours
    maximum = columns.amax(dim=1)
    x = _relative(columns, maximum, temperature)
    exp = x.exp()
    total = exp.sum(dim=1)
    return torch.stack([maximum, total, exp.mul_(x).sum(dim=1), target])


def _gather(partial: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[tp, 4, n] from every rank's [4, n]."""
    size = 1 if group is None else group.size()
    if size == 1:
        return partial[None]
    gathered = partial.new_empty((size, *partial.shape))
    dist.all_gather_into_tensor(gathered.view(-1), partial.view(-1), group=group)
    return gathered


def _combine(gathered: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest logit M, log sum exp((logit - M) / temperature), log-prob and entropy, each [n], from [tp, 4, n]."""
    maxima, sums, weighted, targets = gathered.unbind(1)
    maximum = maxima.amax(dim=0)
    shift = (maxima - maximum) / temperature
    scale = shift.exp()
    total = (scale * sums).sum(dim=0)
    mean = (scale * (weighted + shift * sums)).sum(dim=0) / total
    log_total = total.log()
    return maximum, log_total, (targets.sum(dim=0) - maximum) / temperature - log_total, log_total - mean
