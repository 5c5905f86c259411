"""How one Megatron parameter is made of Hugging Face tensors, and how tensor parallelism splits it.

Each kind goes both ways: `local` builds a rank's shard from slices of the Hugging Face tensors, `full` builds the
Hugging Face tensors from all ranks' shards, and `fill` puts one rank's shard into its places in tensors that are there
already. All only move numbers, so they serve gradients as well as weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ReadSlice = Callable[[str, int, int, int], Tensor]
"""(name, dim, start, stop) -> the tensor of that name, narrowed to [start, stop) along dim."""


class Shards(Protocol):
    """One parameter. `shapes` are the full Hugging Face shapes by name; `split` tells whether ranks hold different
    parts."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    @property
    def split(self) -> bool: ...

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape of one rank's shard."""
        ...

    def local(self, read: ReadSlice, rank: int, ranks: int) -> Tensor:
        """The shard of tensor-parallel rank `rank` of `ranks`."""
        ...

    def full(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        """Full tensors by Hugging Face name, from the shards in rank order (one shard if not `split`). They may be
        views of a single shard."""
        ...

    def fill(self, targets: Mapping[str, Tensor], shard: Tensor, rank: int, ranks: int) -> None:
        """Write the shard of rank `rank` of `ranks` to where it belongs in the full tensors `targets`, which are
        contiguous and on any device."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicated:
    """The same vector on every rank (norms)."""

    name: str
    size: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.name: (self.size,)}

    @property
    def split(self) -> bool:
        return False

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        return (self.size,)

    def local(self, read: ReadSlice, rank: int, ranks: int) -> Tensor:
        return read(self.name, 0, 0, self.size)

    def full(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        return {self.name: shards[0]}

    def fill(self, targets: Mapping[str, Tensor], shard: Tensor, rank: int, ranks: int) -> None:
        targets[self.name].copy_(shard)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A matrix cut along `dim` into equal parts, the last ones filled up with zeros where `shape[dim]` does not
    divide."""

    name: str
    shape: tuple[int, int]
    dim: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    @property
    def split(self) -> bool:
        return True

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        part = -(-self.shape[self.dim] // ranks)
        return (part, self.shape[1]) if self.dim == 0 else (self.shape[0], part)

    def local(self, read: ReadSlice, rank: int, ranks: int) -> Tensor:
        size, part = self.shape[self.dim], self.local_shape(ranks)[self.dim]
        start, stop = min(rank * part, size), min((rank + 1) * part, size)
        shard = read(self.name, self.dim, start, stop)
        missing = list(self.shape)
        missing[self.dim] = part - (stop - start)
        return torch.cat([shard, shard.new_zeros(missing)], dim=self.dim) if missing[self.dim] else shard

    def full(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        whole = _join(shards, self.dim)
        return {self.name: whole.narrow(self.dim, 0, self.shape[self.dim])}

    def fill(self, targets: Mapping[str, Tensor], shard: Tensor, rank: int, ranks: int) -> None:
        size, part = self.shape[self.dim], self.local_shape(ranks)[self.dim]
        start, stop = min(rank * part, size), min((rank + 1) * part, size)
        target = targets[self.name].narrow(self.dim, start, stop - start)
        target.copy_(shard.narrow(self.dim, 0, stop - start))


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryKeyValue:
    """Weight or bias of the fused projection: for each key/value head its query heads, then the key, then the value."""

    query: str
    key: str
    value: str
    groups: int
    """Key/value heads."""

    queries_per_group: int
    head_dim: int
    columns: tuple[int, ...]
    """(hidden_size,) for a weight, () for a bias."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        narrow = self.groups * self.head_dim
        return {
            self.query: (narrow * self.queries_per_group, *self.columns),
            self.key: (narrow, *self.columns),
            self.value: (narrow, *self.columns),
        }

    @property
    def split(self) -> bool:
        return True

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        rows = self.groups // ranks * sum(self._heads().values()) * self.head_dim
        return (rows, *self.columns)

    def local(self, read: ReadSlice, rank: int, ranks: int) -> Tensor:
        groups = self.groups // ranks
        parts = []
        for name, heads in self._heads().items():
            rows = groups * heads * self.head_dim
            part = read(name, 0, rank * rows, (rank + 1) * rows)
            parts.append(part.view(groups, heads * self.head_dim, *self.columns))
        return torch.cat(parts, dim=1).flatten(0, 1)

    def full(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        heads = self._heads()
        whole = _join(shards).view(self.groups, sum(heads.values()) * self.head_dim, *self.columns)
        parts = whole.split([count * self.head_dim for count in heads.values()], dim=1)
        return {name: part.flatten(0, 1) for name, part in zip(heads, parts, strict=True)}

    def fill(self, targets: Mapping[str, Tensor], shard: Tensor, rank: int, ranks: int) -> None:
        heads, groups = self._heads(), self.groups // ranks
        rows = [count * self.head_dim for count in heads.values()]
        parts = shard.view(groups, sum(rows), *self.columns).split(rows, dim=1)
        for name, part in zip(heads, parts, strict=True):
            targets[name].view(ranks, *part.shape)[rank].copy_(part)

    def _heads(self) -> dict[str, int]:
        """Heads that a group has of each, in Megatron's order."""
        return {self.query: self.queries_per_group, self.key: 1, self.value: 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class GateUp:
    """The fused first matrix of the gated MLP: a rank's rows of the gate, then its rows of the up projection."""

    gate: str
    up: str
    shape: tuple[int, int]
    """Of each of the two."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.gate: self.shape, self.up: self.shape}

    @property
    def split(self) -> bool:
        return True

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        return (2 * self.shape[0] // ranks, self.shape[1])

    def local(self, read: ReadSlice, rank: int, ranks: int) -> Tensor:
        rows = self.shape[0] // ranks
        return torch.cat([read(name, 0, rank * rows, (rank + 1) * rows) for name in (self.gate, self.up)])

    def full(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return {
            self.gate: _join([gate for gate, _ in halves]),
            self.up: _join([up for _, up in halves]),
        }

    def fill(self, targets: Mapping[str, Tensor], shard: Tensor, rank: int, ranks: int) -> None:
        rows = self.shape[0] // ranks
        for name, half in zip((self.gate, self.up), shard.chunk(2), strict=True):
            targets[name].narrow(0, rank * rows, rows).copy_(half)


def _join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The parts behind each other; one part is itself, not a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)
