"""How one Megatron parameter is made of Hugging Face tensors, and how tensor parallelism splits it.

A kind of parameter says of each rank's shard which part is which slice of which tensor (`blocks`); loading a shard and
putting shards together only move numbers by that, so they serve gradients as well as weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ReadSlice = Callable[[str, int, int, int], Tensor]
"""(name, dim, start, stop) -> the tensor of that name, narrowed to [start, stop) along dim."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a shard, as a view of it, and the slice of a Hugging Face tensor that it holds, row for row."""

    part: Tensor
    name: str
    dim: int
    start: int
    stop: int


class Shards(ABC):
    """One parameter."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The full Hugging Face shapes by name."""

    @property
    def split(self) -> bool:
        """Whether ranks hold different parts."""
        return True

    @abstractmethod
    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape of one rank's shard."""

    @abstractmethod
    def blocks(self, shard: Tensor, rank: int, ranks: int) -> Iterator[Block]:
        """What the shard of tensor-parallel rank `rank` of `ranks` holds; the rest of it is padding."""

    def load(self, shard: Tensor, read: ReadSlice, rank: int, ranks: int) -> None:
        """Fill the shard of a rank with its slices, and with zeros where it is padding."""
        blocks = list(self.blocks(shard, rank, ranks))
        if sum(block.part.numel() for block in blocks) < shard.numel():
            shard.zero_()
        for block in blocks:
            block.part.copy_(read(block.name, block.dim, block.start, block.stop).view(block.part.shape))

    def fill(self, targets: Mapping[str, Tensor], shard: Tensor, rank: int, ranks: int) -> None:
        """Write the shard of a rank to where it belongs in the full tensors `targets`, which are contiguous and on any
        device."""
        for block in self.blocks(shard, rank, ranks):
            target = targets[block.name].narrow(block.dim, block.start, block.stop - block.start)
            target.view(block.part.shape).copy_(block.part)

    def full(self, stacked: Tensor) -> dict[str, Tensor]:
        """New full tensors on the CPU by Hugging Face name, from all ranks' shards [ranks, *shape] (one if not
        `split`)."""
        tensors = {name: torch.empty(shape, dtype=stacked.dtype) for name, shape in self.shapes.items()}
        for rank, shard in enumerate(stacked):
            self.fill(tensors, shard, rank, len(stacked))
        return tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Single(Shards):
    """One tensor: cut along `dim` into equal parts, the last ones filled up with zeros where `shape[dim]` does not
    divide; or the same on every rank (norms)."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    @property
    def split(self) -> bool:
        return self.dim is not None

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        return tuple(-(-size // ranks) if dim == self.dim else size for dim, size in enumerate(self.shape))

    def blocks(self, shard: Tensor, rank: int, ranks: int) -> Iterator[Block]:
        dim = self.dim or 0
        size, part = self.shape[dim], self.local_shape(ranks)[dim]
        start, stop = (min(rank * part, size), min((rank + 1) * part, size)) if self.split else (0, size)
        yield Block(shard.narrow(dim, 0, stop - start), self.name, dim, start, stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused(Shards):
    """Several tensors' rows in one parameter: in each group some of the first one's, then of the second's, and so on.

    Query, key and value: a group for each key/value head, with its query heads, the key and the value. Gate and up
    projection: a group for each rank.
    """

    rows: Mapping[str, int]
    """Rows of each full tensor, in Megatron's order."""

    columns: tuple[int, ...]
    """(hidden_size,) for a weight, () for a bias."""

    groups: int | None
    """None: as many as there are ranks."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: (rows, *self.columns) for name, rows in self.rows.items()}

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        return (sum(self.rows.values()) // ranks, *self.columns)

    def blocks(self, shard: Tensor, rank: int, ranks: int) -> Iterator[Block]:
        own = {name: rows // ranks for name, rows in self.rows.items()}
        groups = 1 if self.groups is None else self.groups // ranks
        parts = shard.unflatten(0, (groups, -1)).split([rows // groups for rows in own.values()], dim=1)
        for (name, rows), part in zip(own.items(), parts, strict=True):
            yield Block(part, name, 0, rank * rows, (rank + 1) * rows)
