"""What traced ranks say together: equal calls over every group they share, sends that are received; peaks against the
plan; waits inside the loops over micro-batches. Imports no torch."""

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import Config
from megatron_dapo.plan.memory import PHASES, RankMemory, trainer_memory
from megatron_dapo.plan.rank_state import DTYPE_BYTES, projections
from megatron_dapo.plan.scenario import Calibration, Scenario

CLOSE = 0.03
"""How far a traced peak may be above the planned one, relative."""

CAUTIOUS = 0.06
"""And below it: a plan that asks for a little too much wastes a part of a GPU, and ends no run. Of a weight sync it
counts two full buckets beside the largest parameter."""

SMALL = 2.5e8
"""Bytes: a smaller difference is close too. Between phases a rank may hold next to nothing."""


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


class Wait(NamedTuple):
    """Where the host waits for the device."""

    what: str
    place: str
    loop: str
    """Megatron's schedule, inside whose loop over micro-batches it is, or ""."""

    times: int


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """What one rank did."""

    rank: int
    place: Mapping[str, int]
    kernels: str
    calls: Sequence[Call]
    waits: Sequence[Wait]
    peaks: Mapping[str, int]
    """Bytes on the device by phase."""

    seconds: float = 0.0

    added_gradients: int = 0
    """Matrix products that added a weight's gradient to its float32 buffer."""


def disagreements(traces: Sequence[RankTrace]) -> list[str]:
    """What the ranks would fail or hang at, a line each."""
    found = []
    for trace in traces:
        places = Counter((call.op, call.tensors, call.place) for call in trace.calls if call.on_cpu)
        for (op, tensors, where), count in places.items():
            found.append(f"rank {trace.rank}: {op} of a CPU tensor {tensors} over NCCL at {where}, {count} times")
    for one, other in itertools.combinations(traces, 2):
        mine, theirs = _streams(one), _streams(other)
        for name, ranks in dict.fromkeys([*mine, *theirs]):
            if not {one.rank, other.rank} <= set(ranks):
                continue
            for index, (left, right) in enumerate(itertools.zip_longest(mine[name, ranks], theirs[name, ranks])):
                if _kind(left) != _kind(right):
                    ends = f"{_told(left)} on rank {one.rank} and {_told(right)} on rank {other.rank}"
                    found.append(f"{name} {index} is {ends}")
                    break
    return found


def _streams(trace: RankTrace) -> dict[tuple[str, tuple[int, ...]], list[Call]]:
    """Calls that must be equal and in the same order on all of some ranks: those of a group, and those from one rank to
    another."""
    streams: dict[tuple[str, tuple[int, ...]], list[Call]] = defaultdict(list)
    for call in trace.calls:
        if call.peer is None:
            streams[f"{call.group} of {len(call.ranks)} ranks: call", call.ranks].append(call)
        else:
            ends = (trace.rank, call.peer) if call.op == "send" else (call.peer, trace.rank)
            streams[f"{call.group}: message", ends].append(call)
    return streams


def _kind(call: Call | None) -> tuple[str, str] | None:
    """What is to be equal on both ranks: a send meets a receive."""
    return None if call is None else ("message" if call.peer is not None else call.op, call.tensors)


def _told(call: Call | None) -> str:
    return "missing" if call is None else f"{call.op} {call.tensors} ({call.phase}, {call.place})"


class Peak(NamedTuple):
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
        """Within CLOSE above and CAUTIOUS below, or SMALL."""
        return -CAUTIOUS <= self.deviation <= CLOSE or abs(self.traced - self.planned) <= SMALL


def loop_waits(traces: Sequence[RankTrace]) -> dict[tuple[str, str], int]:
    """(what, place) of the waits inside a loop over micro-batches, which should have none: how often on the rank that
    does it most."""
    most: Counter[tuple[str, str]] = Counter()
    for wait in (wait for trace in traces for wait in trace.waits if wait.loop):
        most[wait.what, wait.place] = max(wait.times, most[wait.what, wait.place])
    return dict(sorted(most.items()))


def own(stage: RankMemory, phase: str) -> float:
    """What the plan gives a rank itself: a server's weights on the same GPU are no part of a trace."""
    return stage.peaks[phase] - stage.items[phase].get("servers' weights", 0.0)


def stand_ins(config: Config, hf: HFModelConfig, *, last: bool) -> int:
    """Bytes that TransformerEngine keeps from the first update on where products add gradients to their buffers: a
    tensor in place of the gradient for each shape of a weight. The plan counts them with the framework. `last`: whether
    the stage has the output layer."""
    tensor = config.actor.layout.tensor
    rows = sum(projections(hf, tensor).values()) + (math.ceil(hf.vocab_size / tensor) if last else 0)
    return rows * hf.hidden_size * DTYPE_BYTES[config.model.dtype]


def first_of_stage(trace: RankTrace) -> bool:
    return not any(at for what, at in trace.place.items() if what != "pipeline")


class Findings:
    """All that is said about a config's traces. `peaks`: every phase that the plan has a figure for, rank by rank."""

    def __init__(self, traces: Sequence[RankTrace], config: Config, hf: HFModelConfig, constants: Calibration) -> None:
        bare = dataclasses.replace(constants, framework_memory=0.0, fragmentation=0.0)
        stages = trainer_memory(Scenario(config, hf, bare))
        by_stage = config.way_of_weights(on_gpus=True) in ("distributed", "delta")
        self.traces, self.waits, self.disagreements = traces, loop_waits(traces), disagreements(traces)
        self.peaks = []
        for trace in traces:
            at = trace.place["pipeline"]
            kept = all(words in trace.kernels for words in ("TransformerEngine", "accumulation: in the matrix product"))
            more = stand_ins(config, hf, last=at == len(stages) - 1) if kept else 0
            self.peaks += [
                Peak(trace.rank, phase, trace.peaks[phase], own(stages[at], phase) + more)
                for phase in PHASES
                # Other ranks gather nothing.
                if phase != "weight sync" or trace.rank == 0 or (by_stage and first_of_stage(trace))
            ]

    @property
    def faults(self) -> list[str]:
        """What would stop or slow the ranks, or what the plan has wrong; a line each."""
        found = list(self.disagreements)
        for trace in self.traces:
            if "accumulation: in the matrix product" in trace.kernels and not trace.added_gradients:
                found.append(f"rank {trace.rank}: no product adds a weight's gradient to its buffer")
        for (what, place), count in self.waits.items():
            found.append(f"{what} in the loop over micro-batches at {place}, {count} times")
        for peak in self.peaks:
            if not peak.close:
                shown = f"peak {peak.traced / 1e9:.2f} GB, planned {peak.planned / 1e9:.2f} GB"
                found.append(f"rank {peak.rank}, {peak.phase}: {shown}")
        return found

    def tables(self) -> str:
        """Markdown: peaks, calls, waits."""
        titles = ["rank", "place", *PHASES, "calls", "sends, receives", "s"]
        lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        for trace in self.traces:
            place = " ".join(f"{name[0].upper()}P{number}" for name, number in trace.place.items())
            peaks = {peak.phase: peak for peak in self.peaks if peak.rank == trace.rank}
            shown = (
                f"{peaks[phase].traced / 1e9:.2f} ({peaks[phase].deviation:+.1%})" if phase in peaks else ""
                for phase in PHASES
            )
            messages = sum(call.peer is not None for call in trace.calls)
            cells = [trace.rank, place, *shown, len(trace.calls) - messages, messages, f"{trace.seconds:.0f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        for (what, place), count in self.waits.items():
            lines += ["", f"Waits in the loop over micro-batches: {what}, `{place}`, {count} times."]
        return "\n".join(lines)
