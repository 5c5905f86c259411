"""How the sequences of one packed micro-batch lie in the token stream, and what attention works out once for them.

Legend: T tokens of the stream (padded), t = T / CP of them on this context-parallel rank, L padded length of one
sequence.

A stream is sequence after sequence, each padded on its right. Padding needs no mask: attention is causal, so no real
token sees what comes after it, and what a padding token computes carries no loss. Under context parallelism each
sequence is cut into 2*CP chunks and rank r holds chunks r and 2*CP-1-r of every sequence, in sequence order
("zigzag": each rank gets the same share of the causal triangle; it is also the layout of TransformerEngine and of
Megatron's rotary embedding).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_dapo.actor.packing import zigzag_positions

# A bucket holds sequences of at least this share of its longest, or at most this many tokens shorter: below that a
# call's overhead costs more than the padding.
BUCKET_FILL = 0.75
BUCKET_SLACK_TOKENS = 32

# Longer sequences (tokens) are computed alone. On the CPU a call, forward and backward, costs about as much as copying
# and padding 30 tokens of 8 heads of 64 into a bucket and back: measured, one by one is faster from there on. On CUDA a
# call launches several small kernels, so that buckets pay for much longer ones.
BUCKET_LONGEST = {"cpu": 32, "cuda": 4096}


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

    Lengths are those of the whole sequences, with their padding to a multiple of 2*CP (of 1 without CP).
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


def _local_positions(length: int, context_parallel: int, context_rank: int) -> torch.Tensor:
    """[length / CP] positions of one sequence that a context-parallel rank holds, in its order."""
    if context_parallel == 1:
        return torch.arange(length)
    return torch.from_numpy(zigzag_positions(np.array([length]), context_parallel, context_rank))


def _plan(lengths: Sequence[int], ranks: int, rank: int, device: torch.device) -> AttentionPlan:
    positions = [_local_positions(length, ranks, rank) for length in lengths]
    starts = [0]
    for own in positions:
        starts.append(starts[-1] + len(own))
    rows = [torch.arange(start, stop) for start, stop in pairwise(starts)]
    local_lengths = tuple(len(own) for own in positions)
    if ranks == 1 and len(set(lengths)) == 1:
        here = torch.cat(positions).to(device)
        return AttentionPlan(positions=here, lengths=local_lengths, equal=True, alone=(), buckets=(), slots=None)
    # Gathered keys of a sequence do not lie next to each other: under context parallelism nothing is computed alone.
    longest_in_bucket = BUCKET_LONGEST[device.type] if ranks == 1 else max(lengths)
    alone = [i for i, length in enumerate(lengths) if length > longest_in_bucket]
    order = [rows[i] for i in alone]
    buckets = []
    for members in _similar(lengths, longest_in_bucket):
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
        equal=False,
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
