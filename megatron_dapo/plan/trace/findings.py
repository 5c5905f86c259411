"""What traced ranks say together: equal calls over every group they share, sends that are received, shards that do not
overlap; peaks against the plan; waits inside the loops over micro-batches. Imports no torch."""

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import Config
from megatron_dapo.plan.calibration import Calibration
from megatron_dapo.plan.memory import PHASES, trainer_memory
from megatron_dapo.plan.scenario import Scenario

CLOSE = 0.03
"""How far a traced peak may be from the planned one, relative."""

SMALL = 1.5e8
"""Bytes: a smaller difference is close too. Between phases a rank may hold next to nothing."""

KNOWN_WAITS = {
    ("megatron/core/pipeline_parallel/p2p_communication.py", "_communicate_shapes"): (
        "micro-batches differ in length, so pipeline ranks tell each other the shape of each"
    ),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "_communicate"): (
        "Megatron's batch_p2p_sync, on by default: batched sends once raced in PyTorch"
    ),
}
"""(file, function) of waits in a loop over micro-batches that are accepted, and why."""

_PHASE = {"optimizer step": "update, optimizer step"}
"""Of the plan, under which name the trace has it."""


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
            sizes[shard.key] = math.prod(shard.shape)
            written[shard.key] += math.prod(shard.size)
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
        name = f"{group[0]} of ranks {_shown(group[1])}: call"
        yield from _first_difference(
            name,
            (one.rank, [call for call in mine if call.peer is None]),
            (other.rank, [call for call in theirs if call.peer is None]),
        )
        for sender, sent, receiver, received in ((one, mine, other, theirs), (other, theirs, one, mine)):
            yield from _first_difference(
                f"{group[0]}: message",
                (sender.rank, [call for call in sent if (call.op, call.peer) == ("send", receiver.rank)]),
                (receiver.rank, [call for call in received if (call.op, call.peer) == ("receive", sender.rank)]),
            )


def _first_difference(name: str, one: tuple[int, list[Call]], other: tuple[int, list[Call]]) -> Iterator[str]:
    """The first of two ranks' calls that do not belong together: another operation (a send to a receive is none), or
    other tensors."""

    def kind(call: Call) -> tuple[str, str]:
        return "message" if call.peer is not None else call.op, call.tensors

    for index, (left, right) in enumerate(itertools.zip_longest(one[1], other[1])):
        if left is None or right is None or kind(left) != kind(right):
            yield f"{name} {index} is {_told(left)} on rank {one[0]} and {_told(right)} on rank {other[0]}"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """A rank's most bytes in one phase; the framework's own and fragmentation, which no trace sees, are not planned."""

    rank: int
    phase: str
    traced: float
    planned: float

    @property
    def deviation(self) -> float:
        """Relative to the plan."""
        return self.traced / self.planned - 1 if self.planned else float(self.traced > 0)

    @property
    def close(self) -> bool:
        """Within CLOSE, or SMALL."""
        return abs(self.deviation) <= CLOSE or abs(self.traced - self.planned) <= SMALL


def peaks(traces: Sequence[RankTrace], config: Config, hf: HFModelConfig, constants: Calibration) -> list[Peak]:
    """Every phase that the plan has a figure for, rank by rank. Only rank 0 gathers weights."""
    bare = dataclasses.replace(constants, framework_memory=0.0, fragmentation=0.0)
    stages = trainer_memory(Scenario(config, hf, bare))
    return [
        Peak(
            rank=trace.rank,
            phase=phase,
            traced=trace.peaks[_PHASE.get(phase, phase)],
            planned=stages[trace.place["pipeline"]].peaks[phase],
        )
        for trace in traces
        for phase in PHASES
        if phase != "weight sync" or trace.rank == 0
    ]


def loop_waits(traces: Sequence[RankTrace]) -> dict[tuple[str, str], tuple[int, str | None]]:
    """(what, place) of the waits inside a loop over micro-batches: how often on the rank that does it most, and why it
    is accepted (None: it is not)."""
    found: dict[tuple[str, str], tuple[int, str | None]] = {}
    for trace in traces:
        counts: Counter[tuple[str, str]] = Counter()
        for what, place, loop, count in trace.waits:
            if loop:
                counts[what, place] += count
        for key, count in counts.items():
            found[key] = (max(count, found.get(key, (0, None))[0]), _reason(key[1]))
    return dict(sorted(found.items()))


def _reason(place: str) -> str | None:
    file, _, rest = place.partition(":")
    return KNOWN_WAITS.get((file, rest.partition(" ")[2]))


@dataclass(frozen=True)
class Findings:
    """All that is said about a config's traces."""

    traces: Sequence[RankTrace]
    peaks: Sequence[Peak]
    waits: Mapping[tuple[str, str], tuple[int, str | None]]
    disagreements: Sequence[str]

    @classmethod
    def of(cls, traces: Sequence[RankTrace], config: Config, hf: HFModelConfig, constants: Calibration) -> "Findings":
        """Of the traces of one config."""
        found = peaks(traces, config, hf, constants)
        return cls(traces, found, loop_waits(traces), disagreements(traces))

    @property
    def faults(self) -> list[str]:
        """What would stop or slow the ranks, or what the plan has wrong; a line each."""
        return [
            *self.disagreements,
            *(
                f"{what} in the loop over micro-batches at {place}, {count} times"
                for (what, place), (count, reason) in self.waits.items()
                if reason is None
            ),
            *(
                f"rank {peak.rank}, {peak.phase}: peak {peak.traced / 1e9:.2f} GB, planned {peak.planned / 1e9:.2f} GB"
                for peak in self.peaks
                if not peak.close
            ),
        ]

    def tables(self) -> str:
        """Markdown: peaks, calls, waits."""
        lines = [
            "| rank | place | " + " | ".join(PHASES) + " | calls | sends, receives | s |",
            "|---" * (len(PHASES) + 5) + "|",
        ]
        by_rank = {(peak.rank, peak.phase): peak for peak in self.peaks}
        for trace in self.traces:
            place = " ".join(f"{name[0].upper()}P{number}" for name, number in trace.place.items())
            cells = [_cell(by_rank.get((trace.rank, phase))) for phase in PHASES]
            messages = sum(call.peer is not None for call in trace.calls)
            cells += [str(len(trace.calls) - messages), str(messages), f"{trace.seconds:.0f}"]
            lines.append(f"| {trace.rank} | {place} | " + " | ".join(cells) + " |")
        for (what, place), (count, reason) in self.waits.items():
            accepted = reason or "not accepted"
            lines.append(f"\nWaits in the loop over micro-batches: {what}, `{place}`, {count} times ({accepted}).")
        return "\n".join(lines)


def _cell(peak: Peak | None) -> str:
    return "" if peak is None else f"{peak.traced / 1e9:.2f} ({peak.deviation:+.1%})"
