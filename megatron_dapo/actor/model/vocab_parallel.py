"""Softmax statistics over a vocabulary that lies in pieces: on tensor-parallel ranks, and in blocks of one rank.

Each piece gives four numbers a position (`reduce_columns`): its largest logit, sum of exp(x), sum of exp(x) * x, and
the target's logit if it has it. `merge` makes those of one piece out of several, `combine` log-prob and entropy of all
ranks' pieces. `gradient_columns` is the way back. The formulas stand in `logprob`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    ranks = 1 if group is None else group.size()
    gathered = piece[None]
    if ranks > 1:
        gathered = piece.new_empty((ranks, *piece.shape))
        dist.all_gather_into_tensor(gathered.view(-1), piece.view(-1), group=group)
    maximum, total, weighted, target = merge(gathered, temperature).unbind()
    log_total = total.log()
    return maximum, log_total, (target - maximum) / temperature - log_total, log_total - weighted / total


def gradient_columns(
    columns: Tensor,
    targets: Tensor,
    statistics: Sequence[Tensor],
    down: Tensor,
    spread: Tensor | None,
    temperature: float,
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
    if spread is None:
        grad = log_pi.exp_().mul_(-down[:, None])
    else:
        factor = (log_pi + entropy).mul_(-spread[:, None]).sub_(down[:, None])
        grad = log_pi.exp_().mul_(factor)
    if columns.shape[1]:
        ours, column = _own_targets(targets, columns.shape[1])
        grad.scatter_add_(1, column[:, None], (down * ours)[:, None])
    return grad


def _relative(columns: Tensor, maximum: Tensor, temperature: float) -> Tensor:
    """x minus the largest x: (logit - maximum) / temperature, in place. The difference first: it loses no digits."""
    columns.sub_(maximum[:, None])
    return columns if temperature == 1.0 else columns.div_(temperature)
