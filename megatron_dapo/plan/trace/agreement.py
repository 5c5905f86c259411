"""What traced ranks must have in common: equal calls over every group they share, sends that are received, shards that
do not overlap. Imports no torch."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Call(NamedTuple):
    """One collective, send or receive of a rank."""

    group: str
    """Backend and Megatron's name of the group: "nccl TENSOR_MODEL_PARALLEL_GROUP"."""

    ranks: tuple[int, ...]
    op: str
    tensors: str
    """Types and shapes: "bfloat16[2816, 1, 5120]"."""

    peer: int | None
    """Global rank on the other side of a send or receive."""

    phase: str
    place: str
    on_cpu: bool
    """A CPU tensor in an NCCL group."""


class Shard(NamedTuple):
    """A block of a tensor in a checkpoint, as one rank writes it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank did."""

    rank: int
    world_size: int
    place: Mapping[str, int]
    kernels: str
    calls: Sequence[Call]
    waits: Sequence[tuple[str, str, str, int]]
    """What, place, loop over micro-batches or "", how often."""

    peaks: Mapping[str, int]
    """Bytes on the device by phase."""

    shards: Sequence[Shard]
    """Those that this rank writes."""

    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def disagreements(traces: Sequence[RankTrace]) -> list[str]:
    """What the ranks would fail or hang at, a line each."""
    return [
        *(line for trace in traces for line in _cpu_tensors(trace)),
        *(line for one, other in itertools.combinations(traces, 2) for line in _pair(one, other)),
        *_overlaps(traces),
    ]


def covered(traces: Iterable[RankTrace]) -> float:
    """Share of the checkpoint's numbers that the traced ranks write; 1 only if every number has a writer."""
    written: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for trace in traces:
        for shard in trace.shards:
            sizes[shard.key] = _product(shard.shape)
            written[shard.key] += _product(shard.size)
    return sum(written.values()) / sum(sizes.values()) if sizes else 0.0


def _cpu_tensors(trace: RankTrace) -> Iterator[str]:
    places = Counter((call.place, call.op, call.tensors) for call in trace.calls if call.on_cpu)
    for (where, op, tensors), count in places.items():
        yield f"rank {trace.rank}: {op} of a CPU tensor {tensors} over NCCL at {where}, {count} times"


def _by_group(trace: RankTrace) -> dict[tuple[str, tuple[int, ...]], list[Call]]:
    groups: dict[tuple[str, tuple[int, ...]], list[Call]] = defaultdict(list)
    for call in trace.calls:
        groups[call.group, call.ranks].append(call)
    return groups


def _pair(one: RankTrace, other: RankTrace) -> Iterator[str]:
    calls = {trace.rank: _by_group(trace) for trace in (one, other)}
    for group in dict.fromkeys([*calls[one.rank], *calls[other.rank]]):
        if not {one.rank, other.rank} <= set(group[1]):
            continue
        mine, theirs = calls[one.rank].get(group, []), calls[other.rank].get(group, [])
        yield from _collectives(group, one.rank, mine, other.rank, theirs)
        for sender, sent, receiver, received in ((one, mine, other, theirs), (other, theirs, one, mine)):
            yield from _messages(group[0], sender.rank, sent, receiver.rank, received)


def _collectives(
    group: tuple[str, tuple[int, ...]], rank: int, mine: Sequence[Call], other: int, theirs: Sequence[Call]
) -> Iterator[str]:
    pairs = itertools.zip_longest(*([call for call in calls if call.peer is None] for calls in (mine, theirs)))
    for index, (left, right) in enumerate(pairs):
        if left is None or right is None or (left.op, left.tensors) != (right.op, right.tensors):
            name = f"{group[0]} of ranks {_shown(group[1])}"
            yield f"{name}: call {index} is {_told(left)} on rank {rank} and {_told(right)} on rank {other}"
            return


def _messages(group: str, sender: int, sent: Sequence[Call], receiver: int, received: Sequence[Call]) -> Iterator[str]:
    pairs = itertools.zip_longest(
        [call for call in sent if call.op == "send" and call.peer == receiver],
        [call for call in received if call.op == "receive" and call.peer == sender],
    )
    for index, (left, right) in enumerate(pairs):
        if left is None or right is None or left.tensors != right.tensors:
            yield f"{group}: message {index} is {_told(left)} on rank {sender} and {_told(right)} on rank {receiver}"
            return


def _told(call: Call | None) -> str:
    return "missing" if call is None else f"{call.op} {call.tensors} ({call.phase}, {call.place})"


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def _overlaps(traces: Sequence[RankTrace]) -> Iterator[str]:
    """Blocks out of bounds, written twice, or of a tensor that ranks size differently."""
    blocks: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
    for trace in traces:
        for shard in trace.shards:
            blocks[shard.key].append((trace.rank, shard))
    for key, own in blocks.items():
        first = own[0][1]
        for rank, shard in own:
            ends = [start + count for start, count in zip(shard.offset, shard.size, strict=True)]
            if (shard.shape, shard.dtype) != (first.shape, first.dtype):
                texts = [f"{part.dtype}{list(part.shape)}" for part in (first, shard)]
                yield f"{key}: {texts[0]} on rank {own[0][0]}, {texts[1]} on rank {rank}"
            elif any(end > whole for end, whole in zip(ends, shard.shape, strict=True)):
                yield f"{key}: rank {rank} writes up to {ends} of {list(shard.shape)}"
        own.sort(key=lambda one: one[1].offset)
        for (rank, left), (other, right) in itertools.combinations(own, 2):
            if right.offset[0] >= left.offset[0] + left.size[0]:
                continue
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(left.offset, left.size, right.offset, right.size, strict=True)
            ):
                yield f"{key}: ranks {rank} and {other} both write at {right.offset}"
                break


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
