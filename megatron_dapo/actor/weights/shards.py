"""How one Megatron parameter is made of Hugging Face tensors, and how tensor parallelism splits it.

`Shards.blocks` says of each rank's shard which part is which slice of which tensor; loading a shard and putting shards
together only move numbers by that, so they serve gradients as well as weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ReadSlice = Callable[[str, int, int, int], Tensor]
"""(name, dim, start, stop) -> the tensor of that name, narrowed to [start, stop) along dim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """One parameter: one tensor, or several side by side along `dim`: in each group some rows of the first one, then of
    the second, and so on.

    Query, key and value: a group for each key/value head, with its query heads, the key and the value. Gate and up
    projection: a group for each rank.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """The full Hugging Face shapes by name, in Megatron's order."""

    dim: int | None = 0
    """Cut over the ranks, into equal parts: the last ones of a single tensor are filled up with zeros where it does not
    divide. None: the same on every rank (norms)."""

    groups: int | None = None
    """Of all ranks together; None: one on each."""

    expert: int | None = None
    """The expert whose weight it is: then the ranks are the expert-tensor-parallel ones that hold it."""

    @property
    def split(self) -> bool:
        """Whether ranks hold different parts."""
        return self.dim is not None

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape of one rank's shard."""
        shape = list(next(iter(self.shapes.values())))
        shape[self.dim or 0] = sum(self._local_sizes(ranks))
        return tuple(shape)

    def load(self, shard: Tensor, read: ReadSlice, rank: int, ranks: int) -> None:
        """Fill the shard of a rank with its slices, and with zeros where it is padding."""
        blocks = list(self.blocks(shard, rank, ranks))
        if sum(part.numel() for part, *_ in blocks) < shard.numel():
            shard.zero_()
        for part, name, start, stop in blocks:
            part.copy_(read(name, self.dim or 0, start, stop).view(part.shape))

    def fill(self, targets: Mapping[str, Tensor], stacked: Tensor) -> None:
        """Write all ranks' shards [ranks, *shape] (one if not `split`) to where they belong in the full tensors
        `targets`, which are contiguous and on any device."""
        for rank, shard in enumerate(stacked):
            for part, name, start, stop in self.blocks(shard, rank, len(stacked)):
                targets[name].narrow(self.dim or 0, start, stop - start).view(part.shape).copy_(part)

    def full(self, stacked: Tensor, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """New full tensors by Hugging Face name, from all ranks' shards as in `fill`."""
        tensors = {name: torch.empty(shape, dtype=stacked.dtype, device=device) for name, shape in self.shapes.items()}
        self.fill(tensors, stacked)
        return tensors

    def blocks(self, shard: Tensor, rank: int, ranks: int) -> Iterator[tuple[Tensor, str, int, int]]:
        """(a part of the shard of tensor-parallel rank `rank` of `ranks`, as a view of it, and the tensor whose slice
        [start, stop) along `dim` it holds, row for row); the rest of the shard is padding."""
        dim, index, at = self.dim or 0, rank if self.split else 0, 0
        groups = 1 if self.groups is None else self.groups // ranks
        grouped = shard.unflatten(dim, (groups, -1))
        for (name, shape), size in zip(self.shapes.items(), self._local_sizes(ranks), strict=True):
            start, stop = (min(number * size, shape[dim]) for number in (index, index + 1))
            yield grouped.narrow(dim + 1, at // groups, (stop - start) // groups), name, start, stop
            at += size

    def _local_sizes(self, ranks: int) -> list[int]:
        """Of each tensor, along `dim`, with padding."""
        return [-(-shape[self.dim or 0] // (ranks if self.split else 1)) for shape in self.shapes.values()]
