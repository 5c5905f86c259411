"""Core attention of the local layer spec: rotary embedding and PyTorch's own attention on packed sequences.

Megatron's own local attention takes neither packed sequences nor context parallelism. A stream is sequence after
sequence, each padded on its right. Padding needs no mask: attention is causal, so no real token sees what comes after
it, and what a padding token computes carries no loss. Under context parallelism each sequence is cut into 2*CP chunks
and rank r holds chunks r and 2*CP-1-r of every sequence, in sequence order ("zigzag": each rank gets the same share of
the causal triangle; it is also the layout of TransformerEngine and of Megatron's rotary embedding).

Legend: T tokens of the stream (padded), t = T / CP of them on this context-parallel rank, L padded length of one
sequence, H query heads and G key/value heads on this tensor-parallel rank, D head size, B sequences of a bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_dapo.actor.packing import round_up, zigzag_positions

# A bucket holds sequences of at least this share of its longest, or at most this many tokens shorter: below that a
# call's overhead costs more than the padding.
BUCKET_FILL = 0.75
BUCKET_SLACK_TOKENS = 32

# Longer sequences (tokens) are computed alone. On the CPU a call, forward and backward, costs about as much as copying
# and padding 30 tokens of 8 heads of 64 into a bucket and back: measured, one by one is faster from there on. On CUDA a
# call launches several small kernels, so that buckets pay for much longer ones.
BUCKET_LONGEST = {"cpu": 32, "cuda": 4096}

LENGTH_STEP = 1024
"""The longest sequence is rounded up to it, in tokens: by that number Megatron looks for rotary angles that it has, and
keeps 32 of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Sequences of similar length that attention computes as one padded batch of B."""

    queries: torch.Tensor
    """[B, Lq] row in the local stream of each query; a padding slot repeats the sequence's last row."""

    keys: torch.Tensor
    """[B, Lk] row of each key in the stream gathered over the context-parallel ranks (rank after rank)."""

    mask: torch.Tensor | None
    """bool [B, 1, Lq, Lk], True where the query sees the key; None: plain causal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """How attention goes through one micro-batch, the same for all layers: sequences alone first, then the buckets."""

    positions: torch.Tensor
    """[t] position of each local token in its sequence."""

    lengths: tuple[int, ...]
    """Local tokens of each sequence, in the stream's order."""

    equal: bool
    """All sequences are equally long: the stream is a batch as it lies, and nothing stands in the fields below."""

    alone: tuple[int, ...]
    """Sequences computed by themselves, without padding."""

    buckets: tuple[Bucket, ...]
    slots: torch.Tensor | None
    """[t] where each local token's output lies in all outputs, one after the other; None: in order already."""


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """What `GPTModel.forward(..., packed_seq_params=...)` takes for a stream of sequences: Megatron's parameters of it,
    able to plan attention once for all layers of a micro-batch."""

    padded_lengths: Sequence[int]
    """Of the whole sequences, with their padding to a multiple of 2*CP (of 1 without CP)."""

    device: torch.device
    context_parallel: int = 1
    context_rank: int = 0
    routing: torch.Tensor | None = None
    """uint8 [t, layers, k]: the experts that each local token is sent to; None: the routers choose."""

    counted: torch.Tensor | None = None
    """float64 [t]: 1 for the tokens whose experts are counted, else 0; None: nobody counts."""

    counts: torch.Tensor | None = None
    """float64 [layers, ...] that the layers add to, as `LogProbs.expert_counts`."""

    def __post_init__(self) -> None:
        ends = torch.tensor([0, *self.padded_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.device)
        self.qkv_format, self.cu_seqlens_q, self.cu_seqlens_kv = "thd", ends, ends
        self.max_seqlen_q = self.max_seqlen_kv = round_up(max(self.padded_lengths), LENGTH_STEP)

    @cached_property
    def plan(self) -> AttentionPlan:
        """Buckets of the local stream; worked out on first use."""
        return _plan(self.padded_lengths, self.context_parallel, self.context_rank, self.device)


class Rotary:
    """Cosines and sines of one micro-batch, kept for its layers: the embedding is the same in each of them."""

    def __init__(self, inverse_frequencies: Tensor):
        self.inverse_frequencies = inverse_frequencies
        self._last: tuple[PackedSequences, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, sequences: PackedSequences) -> Tensor:
        """Rotate [t, heads, D] by each token's position in its sequence."""
        if self._last is None or self._last[0] is not sequences or self._last[1].dtype != x.dtype:
            positions = sequences.plan.positions.to(torch.float32)
            angles = torch.outer(positions, self.inverse_frequencies.to(x.device))[:, None]
            self._last = (sequences, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        _, cos, sin = self._last
        return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """Each pair (x_i, x_{i + D/2}) turned by its angle; its gradient is turned back. cos and sin: [t, 1, D / 2]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to_first, to_second = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    return turned


class PackedAttention(MegatronModule):
    """Causal attention with grouped queries inside each sequence of a packed stream.

    Short sequences of similar length are computed as one padded batch, long ones by themselves (see `AttentionPlan`).
    Under context parallelism keys and values of the whole stream are gathered from the ranks.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, rotary: Rotary, pg_collection: Any = None, **_: Any
    ):
        super().__init__(config=config)
        self.rotary = rotary
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.context_group = groups.cp if config.context_parallel_size > 1 else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedSequences, **__: Any
    ) -> Tensor:
        """query [t, H, D], key and value [t, G, D] -> [t, H * D]; a mask, which Megatron may give, is not read."""
        plan = packed_seq_params.plan
        query, key = self.rotary(query, packed_seq_params), self.rotary(key, packed_seq_params)
        if self.context_group is not None:
            gathered = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), group=self.context_group)
            key, value = gathered.unbind(1)
        if plan.equal:
            return self._attend(*[x.unflatten(0, (len(plan.lengths), -1)) for x in (query, key, value)], mask=None)
        outputs = []
        if plan.alone:
            # One split for all: its backward is one concatenation, that of a slice each would be a full-sized sum each.
            parts = [x.split(plan.lengths) for x in (query, key, value)]
            outputs += [self._attend(*(part[i][None] for part in parts), mask=None) for i in plan.alone]
        for bucket in plan.buckets:
            outputs.append(self._attend(query[bucket.queries], key[bucket.keys], value[bucket.keys], mask=bucket.mask))
        output = torch.cat(outputs)
        return output if plan.slots is None else output.index_select(0, plan.slots)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
        """query [B, Lq, H, D], key and value [B, Lk, G, D] -> [B * Lq, H * D]; without a mask, plain causal."""
        if mask is not None:
            # On CUDA the kernel that takes a mask has no grouped queries.
            key, value = (x.repeat_interleave(query.size(2) // x.size(2), dim=2) for x in (key, value))
        grouped = query.size(2) != key.size(2)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        masking: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None}
        output = scaled_dot_product_attention(query, key, value, **masking, enable_gqa=grouped)
        return output.transpose(1, 2).flatten(2).flatten(0, 1)


def _local_positions(length: int, context_parallel: int, context_rank: int) -> torch.Tensor:
    """[length / CP] positions of one sequence that a context-parallel rank holds, in its order."""
    if context_parallel == 1:
        return torch.arange(length)
    return torch.from_numpy(zigzag_positions(np.array([length]), context_parallel, context_rank))


def _plan(lengths: Sequence[int], ranks: int, rank: int, device: torch.device) -> AttentionPlan:
    positions = [_local_positions(length, ranks, rank) for length in lengths]
    local_lengths = tuple(len(own) for own in positions)
    starts = [0, *accumulate(local_lengths)]
    rows = torch.arange(starts[-1]).split(local_lengths)
    equal = ranks == 1 and len(set(lengths)) == 1
    # Gathered keys of a sequence do not lie next to each other: under context parallelism nothing is computed alone.
    longest_in_bucket = BUCKET_LONGEST[device.type] if ranks == 1 else max(lengths)
    alone = [i for i, length in enumerate(lengths) if length > longest_in_bucket and not equal]
    order = [rows[i] for i in alone]
    buckets = []
    for members in [] if equal else _similar(lengths, longest_in_bucket):
        longest = lengths[members[0]]
        width = longest // ranks
        queries = torch.stack([_pad(rows[i], width) for i in members])
        keys = [_key_rows(lengths[i], starts[i], ranks, starts[-1]) for i in members]
        mask = None
        if ranks > 1:
            seen_to = torch.stack([_pad(positions[i], width) for i in members])
            mask = (torch.arange(longest) <= seen_to[..., None])[:, None].to(device)
        padded_keys = torch.stack([_pad(own, longest) for own in keys])
        buckets.append(Bucket(queries=queries.to(device), keys=padded_keys.to(device), mask=mask))
        order.append(queries.flatten())
    return AttentionPlan(
        positions=torch.cat(positions).to(device),
        lengths=local_lengths,
        equal=equal,
        alone=tuple(alone),
        buckets=tuple(buckets),
        slots=_first_places(torch.cat(order), starts[-1], device) if buckets else None,
    )


def _first_places(rows: torch.Tensor, tokens: int, device: torch.device) -> torch.Tensor:
    """[tokens] the first place where each row stands in `rows`; padding repeats a row after its own place."""
    places = torch.full((tokens,), len(rows))
    return places.scatter_reduce(0, rows, torch.arange(len(rows)), reduce="amin").to(device)


def _key_rows(length: int, local_start: int, ranks: int, local_tokens: int) -> torch.Tensor:
    """[length] row of each position of one sequence in the stream gathered rank after rank."""
    rows = torch.empty(length, dtype=torch.long)
    for rank in range(ranks):
        own = _local_positions(length, ranks, rank)
        rows[own] = rank * local_tokens + local_start + torch.arange(len(own))
    return rows


def _similar(lengths: Sequence[int], longest_in_bucket: int) -> list[list[int]]:
    """Indices of the sequences that are short enough, longest first, cut where the next would be padded too much."""
    groups: list[list[int]] = []
    short = [i for i, length in enumerate(lengths) if length <= longest_in_bucket]
    for i in sorted(short, key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and lengths[i] >= min(BUCKET_FILL * longest, longest - BUCKET_SLACK_TOKENS):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _pad(values: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([values, values[-1:].expand(length - len(values))])
