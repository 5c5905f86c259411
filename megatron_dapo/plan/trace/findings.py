"""What a set of traces says: peaks against the plan, waits inside the loops over micro-batches, disagreements."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import Config
from megatron_dapo.plan.calibration import Calibration
from megatron_dapo.plan.memory import PHASES, trainer_memory
from megatron_dapo.plan.scenario import Scenario
from megatron_dapo.plan.trace.agreement import RankTrace, disagreements

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


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that is said about a config's traces."""

    traces: Sequence[RankTrace]
    peaks: Sequence[Peak]
    waits: Mapping[tuple[str, str], tuple[int, str | None]]
    disagreements: Sequence[str]

    @classmethod
    def of(cls, traces: Sequence[RankTrace], config: Config, hf: HFModelConfig, constants: Calibration) -> "Findings":
        """Of the traces of one config."""
        return cls(
            traces=traces,
            peaks=peaks(traces, config, hf, constants),
            waits=loop_waits(traces),
            disagreements=disagreements(traces),
        )

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
