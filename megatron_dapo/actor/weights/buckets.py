"""The whole model passed on in buckets of a byte budget: gathered parameter by parameter, nowhere whole."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.weights.hf_weights import gathered_parameters, model_shards
from megatron_dapo.actor.weights.shards import Shards


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Whole Megatron parameters that travel together, as Hugging Face tensors one behind the other."""

    parameters: int
    """How many."""
    shapes: Mapping[str, tuple[int, ...]]
    """By Hugging Face name, in order."""
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(math.prod, self.shapes.values())) * self.dtype.itemsize

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in `buffer`, uint8 [size]."""
        counts = [math.prod(shape) for shape in self.shapes.values()]
        parts = buffer.view(self.dtype).split(counts)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


class BucketSink(Protocol):
    """Where the buckets go, on rank 0."""

    def buffer(self, size: int) -> Tensor:
        """uint8 [size], on any device, to be filled; what it held before has been used up."""
        ...

    def put(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> None:
        """Take a bucket that is filled. `tensors` are views of the buffer."""
        ...


def plan_buckets(shards: Mapping[str, Shards], dtype: torch.dtype, max_bytes: int) -> list[Bucket]:
    """Parameters in order, as many in a bucket as `max_bytes` hold; a larger one has a bucket to itself.

    A parameter is never cut: what a server fuses (q, k, v; gate, up) then comes in one bucket.
    """
    buckets: list[Bucket] = []
    for one in shards.values():
        alone = Bucket(parameters=1, shapes=one.shapes, dtype=dtype)
        last = buckets[-1] if buckets else None
        if last is not None and last.size + alone.size <= max_bytes:
            together = {**last.shapes, **alone.shapes}
            buckets[-1] = Bucket(parameters=last.parameters + 1, shapes=together, dtype=dtype)
        else:
            buckets.append(alone)
    return buckets


def stream_weights(
    chunks: Sequence[torch.nn.Module],
    hf: HFModelConfig,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    sink: BucketSink | None,
) -> None:
    """Hand the whole model to `sink` on global rank 0; every rank calls, the others with None.

    Rank 0 then holds one bucket and one gathered parameter besides the model, any other rank at most one parameter.

    Raises:
        Exception: what the sink raised, on rank 0, after the other ranks have sent everything.
    """
    stream = gathered_parameters(chunks, hf, dtype=dtype)
    try:
        if sink is not None:
            for bucket in plan_buckets(model_shards(hf), dtype, bucket_bytes):
                views = bucket.views(sink.buffer(bucket.size))
                for shards, stacked in islice(stream, bucket.parameters):
                    assert stacked is not None
                    for rank, shard in enumerate(stacked):
                        shards.fill(views, shard, rank, len(stacked))
                    del shard, stacked  # before the next parameter is gathered
                sink.put(bucket, views)
                del views
    finally:
        for _ in stream:
            pass  # the other ranks send all of them, also after a failure of the sink
