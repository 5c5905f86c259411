"""Where a parameter stands in a Megatron distributed checkpoint.

Such a checkpoint holds whole tensors in chunks. The layers' tensors of one kind are one tensor with the layer as its
first dimension, and of experts the expert as its second, so no split of either shows. The gated MLP's first matrix is
the whole gate, then the whole up projection, unlike on a rank, where each rank's two parts lie together.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.weights.hf_files import SafetensorsReader
from megatron_dapo.actor.weights.hf_weights import FUSED_NORMS, LAYER_NAME
from megatron_dapo.actor.weights.model_tensors import model_shards
from megatron_dapo.actor.weights.shards import Shards

LINEARS = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
"""Megatron stores an extra state of each of these in each layer (nothing, but a load asks for it); of experts each."""

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_NORM_BEFORE_EXPERTS = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
"""Fused into the linear after it only before a dense MLP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A part that is written as one. Offset and shape are within the parameter, without the dimensions before it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    """The tensor-parallel rank that holds it."""

    half: str | None = None
    """Of a gated MLP's first matrix: the Hugging Face tensor that it is a part of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One parameter of the model."""

    name: str
    """Megatron's, with the layer's number, as in `weights.model_shards`."""

    key: str
    """Of the tensor in the checkpoint."""

    at: tuple[int, ...]
    """Its place in the tensor's first dimensions: layer, or layer and expert; empty: it is the tensor."""

    of: tuple[int, ...]
    """The sizes of those: numbers of layers and experts."""

    shards: Shards

    @property
    def lead(self) -> int:
        """Dimensions of that tensor before the parameter's own."""
        return len(self.at)

    def cuts(self, ranks: int) -> int:
        """Of `ranks` tensor-parallel ranks those that it is cut for: an expert is stored whole."""
        return ranks if self.shards.expert is None else 1

    def shape(self, ranks: int) -> tuple[int, ...]:
        """Of the parameter in the checkpoint; the vocabulary is padded to a multiple of `ranks`."""
        ranks = self.cuts(ranks)
        whole = list(self.shards.local_shape(1))
        if self.shards.dim is not None:
            whole[self.shards.dim] = self.shards.local_shape(ranks)[self.shards.dim] * ranks
        return tuple(whole)

    def global_shape(self, ranks: int) -> tuple[int, ...]:
        """Of the tensor that it is in."""
        return (*self.of, *self.shape(ranks))

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shards.shapes.values())

    def chunks(self, ranks: int) -> Iterator[Chunk]:
        """What `ranks` tensor-parallel ranks write."""
        shards, zeros, ranks = self.shards, (0,) * len(self.shape(1)), self.cuts(ranks)
        if len(shards.shapes) > 1 and shards.groups is None:
            for number, (half, (whole, *columns)) in enumerate(shards.shapes.items()):
                rows = whole // ranks
                for rank in range(ranks):
                    offset = (number * whole + rank * rows, *zeros[1:])
                    yield Chunk(offset=offset, shape=(rows, *columns), rank=rank, half=half)
            return
        dim, shape = shards.dim or 0, shards.local_shape(ranks)
        for rank in range(ranks if shards.split else 1):
            offset = (*zeros[:dim], rank * shape[dim], *zeros[dim + 1 :])
            yield Chunk(offset=offset, shape=shape, rank=rank)

    def read(self, chunk: Chunk, source: SafetensorsReader, ranks: int, dtype: torch.dtype) -> Tensor:
        """The chunk's numbers from a Hugging Face folder; nothing else is read."""
        if chunk.half is not None:
            start = chunk.rank * chunk.shape[0]
            return in_dtype(source.read(chunk.half, 0, start, start + chunk.shape[0]), dtype)
        shard = torch.empty(chunk.shape, dtype=dtype)
        (part, name, start, stop), *others = self.shards.blocks(shard, chunk.rank, ranks)
        if not others and part.numel() == shard.numel():  # what is read need not be copied once more
            return in_dtype(source.read(name, self.shards.dim or 0, start, stop), dtype)
        self.shards.load(shard, source.read, chunk.rank, self.cuts(ranks))
        return shard

    def full(self, whole: Tensor) -> dict[str, Tensor]:
        """The Hugging Face tensors of the parameter as the checkpoint has it, padding included; views where they can
        be."""
        shapes = self.shards.shapes
        return {name: part.reshape(shapes[name]) for part, name, _, _ in self.shards.blocks(whole, 0, 1)}


def checkpoint_name(name: str) -> tuple[str, tuple[int, ...]]:
    """(key in a Megatron distributed checkpoint, layer or layer and expert) of a parameter of `model_shards`.

    There the layers of one kind are one tensor, layer by layer, and norms have the names of TransformerEngine's spec.
    """
    in_layer = LAYER_NAME.fullmatch(name)
    if not in_layer:
        return name, ()
    prefix, layer, rest = in_layer.groups()
    if of_expert := _EXPERT.fullmatch(rest):
        return f"{prefix}mlp.experts.experts.{of_expert[2]}", (int(layer), int(of_expert[1]))
    return prefix + {local: fused for fused, local in FUSED_NORMS.items()}.get(rest, rest), (int(layer),)


def stored_parameters(hf: HFModelConfig) -> list[Stored]:
    """Every parameter in the model's order."""
    sizes, stored = (hf.num_layers, 0 if hf.experts is None else hf.experts.count), []
    for name, shards in model_shards(hf).items():
        key, at = checkpoint_name(name)
        if hf.experts is not None:
            key = key.replace(*_NORM_BEFORE_EXPERTS)
        stored.append(Stored(name=name, key=key, at=at, of=sizes[: len(at)], shards=shards))
    return stored


def extra_state_keys(parameters: Sequence[Stored]) -> list[str]:
    """Keys of the entries that hold nothing."""
    keys = []
    for stored in parameters:
        linear = stored.key.removeprefix("decoder.layers.").replace(".experts.experts", "").removesuffix(".weight")
        if linear in LINEARS:
            places = "_".join(".".join(map(str, each)) for each in (stored.at, stored.of))
            keys.append(f"{stored.key.removesuffix('weight')}_extra_state/shard_{places}")
    return keys


def share(parameters: Sequence[Stored], workers: int) -> list[list[Stored]]:
    """The parameters over the workers, each with about the same number of elements.

    Neighbours stay together, so that few workers write to one safetensors file: Linux lets one write at a time.
    """
    total = sum(stored.elements for stored in parameters)
    parts: list[list[Stored]] = [[] for _ in range(workers)]
    begin = 0
    for stored in parameters:
        middle = begin + stored.elements / 2
        parts[int(middle * workers / total)].append(stored)
        begin += stored.elements
    return parts


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Itself where it has that type."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
