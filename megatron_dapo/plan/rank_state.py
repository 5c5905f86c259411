"""Bytes of parameters, gradients and optimizer state of one trainer rank, as Megatron-Core lays them out.

Megatron keeps a model chunk's gradients, and with the distributed optimizer its parameters too, in one buffer: the
parameters in reverse order, each beginning at a multiple of 64 elements, cut into buckets whose ends are multiples of
lcm(data-parallel size, 128). Every data-parallel rank owns an equal part of each bucket, and keeps master weights and
moments of the parameter elements in it. The figures are exact for Megatron's local layer spec; TransformerEngine's
orders a layer's vectors otherwise, which moves padding and the borders of the parts by a few kilobytes.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.packing import round_up
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig

GRADIENT_BYTES = 4
MASTER_BYTES = 4
MOMENT_BYTES = 8
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_BUCKET_ELEMENTS = 40_000_000
_BUCKET_ELEMENTS_A_RANK = 1_000_000


class Parameter(NamedTuple):
    """One tensor of a rank: Parameter(5120)."""

    elements: int
    shared: bool = False
    """The tied embedding, which the first and the last pipeline stage both hold: a bucket of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """What a rank holds from start to end."""

    parameters: int
    gradients: int
    master_weights: int
    moments: int

    @property
    def total(self) -> int:
        """Of all four."""
        return sum(self.items().values())

    def items(self) -> dict[str, int]:
        """Bytes by what they hold."""
        return {name.replace("_", " "): value for name, value in dataclasses.asdict(self).items()}


def rank_state(
    hf: HFModelConfig, actor: ActorConfig, dtype: str, *, stage: int, data_rank: int, overlap: bool
) -> StateBytes:
    """State of any tensor-parallel rank of pipeline stage `stage`.

    Args:
        data_rank: number of the rank among data x context parallel ones, over which the optimizer is sharded.
        overlap: whether gradients are reduced while backward runs (on CUDA with several data-parallel ranks); it cuts
            the first stage's buffers into smaller buckets.
    """
    layout = actor.layout
    ranks = layout.data * layout.context
    held = owned = 0
    for chunk in range(layout.virtual_pipeline or 1):
        tensors = list(chunk_parameters(hf, layout, stage=stage, chunk=chunk))
        if not actor.optimizer.distributed:
            held = owned = held + sum(tensor.elements for tensor in tensors)
            continue
        bucketed = overlap and stage == 0 and chunk == 0
        limit = max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_A_RANK * ranks) if bucketed else None
        for places in _buckets(tensors, limit):
            size = round_up(places[-1][1], math.lcm(ranks, _BUCKET_ALIGNMENT))
            held += size
            owned += _owned(places, size // ranks, data_rank)
    # Weights that are float32 already are their own master weights.
    masters = owned if dtype != "float32" else 0
    return StateBytes(
        parameters=held * DTYPE_BYTES[dtype],
        gradients=held * GRADIENT_BYTES,
        master_weights=masters * MASTER_BYTES,
        moments=owned * MOMENT_BYTES,
    )


def chunk_parameters(hf: HFModelConfig, layout: LayoutConfig, *, stage: int, chunk: int) -> Iterator[Parameter]:
    """The tensors of a model chunk in Megatron's order, each as large as one tensor-parallel rank has it."""
    tensor, stages, chunks = layout.tensor, layout.pipeline, layout.virtual_pipeline or 1
    first, last = stage == chunk == 0, stage == stages - 1 and chunk == chunks - 1
    vocabulary = math.ceil(hf.vocab_size / tensor) * hf.hidden_size
    shared = hf.tied and stages > 1
    if first:
        yield Parameter(vocabulary, shared)
    for _ in range(hf.num_layers // (stages * chunks)):
        yield from _layer_parameters(hf, tensor)
    if last:
        yield Parameter(hf.hidden_size)
        if not hf.tied or shared:
            yield Parameter(vocabulary, shared)


def model_parameters(hf: HFModelConfig) -> int:
    """Elements of the whole model, a tied embedding counted once."""
    return sum(parameter.elements for parameter in chunk_parameters(hf, LayoutConfig(), stage=0, chunk=0))


def _layer_parameters(hf: HFModelConfig, tensor: int) -> Iterator[Parameter]:
    hidden, queries = hf.hidden_size, hf.num_attention_heads * hf.head_dim // tensor
    fused = queries + 2 * hf.num_query_groups * hf.head_dim // tensor
    ffn = hf.ffn_hidden_size // tensor
    attention = [hidden, hidden * queries, fused * hidden]  # input norm, output projection, queries, keys and values
    attention += [fused] * hf.qkv_bias + [hf.head_dim, hf.head_dim] * hf.qk_norm
    yield from map(Parameter, (*attention, hidden, 2 * ffn * hidden, hidden * ffn))  # the MLP and the norm before it


def _buckets(tensors: Sequence[Parameter], limit: int | None) -> Iterator[list[tuple[int, int]]]:
    """Of one bucket after the other: (start, end) of its parameters, in elements from the bucket's own start."""
    places: list[tuple[int, int]] = []
    for tensor in reversed(tensors):
        if tensor.shared and places:
            yield places
            places = []
        start = round_up(places[-1][1] if places else 0, _PARAMETER_ALIGNMENT)
        places.append((start, start + tensor.elements))
        if tensor.shared or (limit is not None and places[-1][1] >= limit):
            yield places
            places = []
    if places:
        yield places


def _owned(places: Sequence[tuple[int, int]], part: int, rank: int) -> int:
    """Elements of a bucket's parameters in the rank's `part` of it; what pads the bucket belongs to nobody."""
    low, high = rank * part, (rank + 1) * part
    return sum(max(0, min(end, high) - max(start, low)) for start, end in places)
