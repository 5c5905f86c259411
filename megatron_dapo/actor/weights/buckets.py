"""Which parameters travel to the servers together, and where each tensor lies in the bytes that are sent."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_dapo.actor.weights.quantize import quantized_shapes, stored_dtype
from megatron_dapo.actor.weights.shards import Shards


@dataclass(kw_only=True)
class Bucket:
    """Whole Megatron parameters that travel together, as Hugging Face tensors one behind the other."""

    dtype: torch.dtype
    """Of those that are not quantized."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By Hugging Face name, in order."""

    parameters: int = 0
    """How many."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [math.prod(shape) * self.dtype_of(name).itemsize for name, shape in self.shapes.items()]

    def dtype_of(self, name: str) -> torch.dtype:
        """Of one tensor."""
        return stored_dtype(name, self.shapes, self.dtype)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in `buffer`, uint8 [size]."""
        parts = zip(self.shapes.items(), buffer.split(self.sizes), strict=True)
        return {name: part.view(self.dtype_of(name)).view(shape) for (name, shape), part in parts}


def plan_buckets(
    shards: Iterable[Shards], dtype: torch.dtype, max_bytes: int, *, quantize: bool = False
) -> list[Bucket]:
    """Parameters in order, as many in a bucket as `max_bytes` hold; a larger one has a bucket to itself.

    A parameter is never cut: what a server fuses (q, k, v; gate, up) then comes in one bucket.
    """
    buckets: list[Bucket] = []
    for one in shards:
        alone = Bucket(dtype=dtype, shapes=quantized_shapes(one.shapes) if quantize else dict(one.shapes))
        if not buckets or buckets[-1].size + alone.size > max_bytes:
            buckets.append(Bucket(dtype=dtype))
        buckets[-1].shapes.update(alone.shapes)
        buckets[-1].parameters += 1
    return buckets
