"""How the sequences of one packed micro-batch lie in the token stream, and what attention works out once for them.

Legend: T tokens of the stream (padded), t = T / CP of them on this context-parallel rank, L padded length of one sequence.

A stream is sequence after sequence, each padded on its right. Padding needs no mask: attention is causal, so no real token
sees what comes after it, and what a padding token computes carries no loss. Under context parallelism each sequence is cut
into 2*CP chunks and rank r holds chunks r and 2*CP-1-r of every sequence, in sequence order ("zigzag": each rank gets the
same share of the causal triangle; it is also the layout of TransformerEngine and of Megatron's rotary embedding).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams

# A bucket holds sequences of at least this share of its longest, or of at most this many tokens: below that a call's
# overhead costs more than the padding.
BUCKET_FILL = 0.75
BUCKET_MIN_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Sequences of similar length that attention computes as one padded batch [B, heads, *, head_dim]."""

    queries: torch.Tensor
    """[B, Lq] row in the local stream of each query; a padding slot repeats the sequence's last row."""

    keys: torch.Tensor
    """[B, Lk] row of each key in the stream gathered over the context-parallel ranks (rank after rank)."""

    mask: torch.Tensor | None
    """bool [B, 1, Lq, Lk], True where the query sees the key; None: plain causal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """Index tensors of one micro-batch, the same for all layers."""

    positions: torch.Tensor
    """[t] position of each local token in its sequence."""

    buckets: tuple[Bucket, ...]
    slots: torch.Tensor
    """[t] where each local token's output lies in the outputs of all buckets, flattened one after the other."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's PackedSeqParams of a stream, able to plan attention once for all layers of a micro-batch."""

    padded_lengths: tuple[int, ...] = ()
    context_parallel: int = 1
    context_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def plan(self) -> AttentionPlan:
        """Buckets of the local stream; worked out on first use."""
        return _plan(self.padded_lengths, self.context_parallel, self.context_rank, self.device)


def packed_sequences(
    padded_lengths: Sequence[int], *, device: torch.device, context_parallel: int = 1, context_rank: int = 0
) -> PackedSequences:
    """What `GPTModel.forward(..., packed_seq_params=...)` takes for a stream of sequences of these padded lengths.

    Lengths are those of the whole sequences, padding included. The stream's rules are those of `padded_length`.
    """
    ends = torch.tensor([0, *padded_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(padded_lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        padded_lengths=tuple(padded_lengths),
        context_parallel=context_parallel,
        context_rank=context_rank,
        device=device,
    )


def padded_lengths(lengths: Sequence[int], *, context_parallel: int, tensor_parallel: int) -> list[int]:
    """Lengths with the padding that a layout needs.

    Context parallelism cuts each sequence into 2*CP equal chunks; sequence parallelism cuts a rank's stream into TP parts,
    for which the last sequence is padded further. (padded_lengths([5, 6], context_parallel=2, tensor_parallel=2) is [8, 8].)
    """
    chunks = 2 * context_parallel if context_parallel > 1 else 1
    padded = [_round_up(length, chunks) for length in lengths]
    total = sum(padded)
    padded[-1] += _round_up(total, chunks * tensor_parallel) - total
    return padded


def local_rows(padded_lengths: Sequence[int], *, context_parallel: int, context_rank: int) -> torch.Tensor:
    """[t] rows of the whole stream [T] that this context-parallel rank holds, in its order."""
    rows, start = [], 0
    for length in padded_lengths:
        rows.append(start + _local_positions(length, context_parallel, context_rank))
        start += length
    return torch.cat(rows)


def _local_positions(length: int, context_parallel: int, context_rank: int) -> torch.Tensor:
    if context_parallel == 1:
        return torch.arange(length)
    chunks = torch.arange(length).view(2 * context_parallel, -1)
    return torch.cat([chunks[context_rank], chunks[2 * context_parallel - 1 - context_rank]])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _plan(lengths: Sequence[int], ranks: int, rank: int, device: torch.device) -> AttentionPlan:
    positions = [_local_positions(length, ranks, rank) for length in lengths]
    starts = [0]
    for own in positions:
        starts.append(starts[-1] + len(own))
    keys = [_key_rows(length, start, ranks, starts[-1]) for length, start in zip(lengths, starts[:-1], strict=True)]

    slots = torch.empty(starts[-1], dtype=torch.long)
    buckets, filled = [], 0
    for members in _similar(lengths):
        longest = max(lengths[i] for i in members)
        width = longest // ranks
        queries = torch.stack([_pad(torch.arange(starts[i], starts[i + 1]), width) for i in members])
        for row, i in enumerate(members):
            first = filled + row * width
            slots[starts[i] : starts[i + 1]] = torch.arange(first, first + len(positions[i]))
        filled += queries.numel()
        mask = None
        if ranks > 1:
            seen_to = torch.stack([_pad(positions[i], width) for i in members])
            mask = (torch.arange(longest) <= seen_to[..., None])[:, None].to(device)
        padded_keys = torch.stack([_pad(keys[i], longest) for i in members])
        buckets.append(Bucket(queries=queries.to(device), keys=padded_keys.to(device), mask=mask))
    return AttentionPlan(positions=torch.cat(positions).to(device), buckets=tuple(buckets), slots=slots.to(device))


def _key_rows(length: int, local_start: int, ranks: int, local_tokens: int) -> torch.Tensor:
    """[length] row of each position of one sequence in the stream gathered rank after rank."""
    rows = torch.empty(length, dtype=torch.long)
    for rank in range(ranks):
        own = _local_positions(length, ranks, rank)
        rows[own] = rank * local_tokens + local_start + torch.arange(len(own))
    return rows


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences, longest first, cut where the next is too short for the bucket of the one before."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and lengths[i] >= min(BUCKET_FILL * longest, longest - BUCKET_MIN_TOKENS):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _pad(values: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([values, values[-1:].expand(length - len(values))])
