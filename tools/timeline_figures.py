"""Figures of a run's timeline: bubble, communication, imbalance, tail, memory, each summed over the recorded steps.

Every share is a sum of seconds over a sum of seconds, all ranks and steps together.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.recorded_spans import ProcessStep, Span

Figures = dict[str, float | None]
PASSES = ("forward-compute", "backward-compute")
SCHEDULE, OPTIMIZER, UPDATE = "forward-backward", "optimizer", "update"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """One rollout step: what the coordinator saw, and the trainer's ranks."""

    step: int
    phases: tuple[Span, ...]
    requests: Mapping[str, tuple[Span, ...]]
    """By server, those that began within the step's phases."""
    ranks: tuple[ProcessStep, ...]

    @property
    def window(self) -> tuple[float, float]:
        """From the first phase's start to the last one's end."""
        return min(span.start for span in self.phases), max(span.end for span in self.phases)


def recorded_steps(found: Mapping[int, Sequence[ProcessStep]], *, skip: int) -> list[RecordedStep]:
    """The steps after the first `skip` rollout steps whose coordinator and ranks were recorded whole."""
    steps = []
    for step, processes in found.items():
        here = next((each for each in processes if each.process == "coordinator"), None)
        ranks = tuple(each for each in processes if "rank" in each.about)
        phases = tuple(span for span in here.spans if span.track == "phases") if here else ()
        if step <= skip or here is None or not ranks or not any(span.name == UPDATE for span in phases):
            continue
        end = max(span.end for span in phases)
        requests: dict[str, list[Span]] = defaultdict(list)
        for span in here.spans:
            if span.track.startswith("server ") and span.start < end:
                requests[span.track.removeprefix("server ")].append(span)
        steps.append(
            RecordedStep(
                step=step,
                phases=phases,
                requests={url: tuple(spans) for url, spans in requests.items()},
                ranks=tuple(sorted(ranks, key=lambda rank: rank.about["rank"])),
            )
        )
    return steps


def timeline_figures(steps: Sequence[RecordedStep], *, layers: int | None, servers: int, tail_share: float) -> Figures:
    """All of them, None where the layout has no such thing or nothing was recorded.

    Args:
        layers: of the model; None where it is not known.
        servers: that the run has; one that is started again has another address.
        tail_share: a moment of the rollout belongs to its tail when fewer than this share of the responses run that ran
            at its fullest moment.
    """
    ranks = [rank for step in steps for rank in step.ranks]
    update = sum(_seconds(rank, "calls", {UPDATE}) for rank in ranks)
    schedule = sum(_seconds(rank, UPDATE, {SCHEDULE}) for rank in ranks)
    compute = sum(_seconds(rank, UPDATE, set(PASSES)) for rank in ranks)
    sync = sum(span.seconds for rank in ranks for span in rank.spans if span.track == UPDATE and "grads" in span.name)
    tensor = None if layers is None else tensor_seconds(ranks, layers=layers)
    piped = any(rank.about["pipeline"] for rank in ranks)
    return {
        "bubble": over(schedule - sync - compute, schedule - sync) if piped else None,
        "gradient_sync": over(sync, update),
        "tensor_parallel": None if tensor is None else over(tensor, update),
        "communication": over(sync + (tensor or 0.0), update),
        "optimizer": over(sum(_seconds(rank, UPDATE, {OPTIMIZER}) for rank in ranks), update),
        "compute": over(compute, update),
        "dp_imbalance": _imbalance(steps),
        "rollout_tail": _tail(steps, tail_share),
        "server_imbalance": _server_imbalance(steps, servers),
        "peak_memory": max((peak for rank in ranks for peak in peaks(rank).values()), default=None),
    }


def peaks(rank: ProcessStep) -> dict[str, float]:
    """Call -> most bytes of memory during it."""
    most: dict[str, float] = {}
    for span in rank.spans:
        if span.track == "calls" and "peak_bytes" in span.about:
            most[span.name] = max(most.get(span.name, 0.0), span.about["peak_bytes"])
    return most


def pass_seconds(steps: Sequence[RecordedStep], call: str) -> float:
    """Seconds of forward and backward passes in all calls of that name, all ranks together."""
    return sum(_seconds(rank, call, set(PASSES)) for step in steps for rank in step.ranks)


def running(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
    """(times [n], how many spans are under way from each time to the next [n])."""
    times = np.array([span.start for span in spans] + [span.end for span in spans])
    changes = np.array([1] * len(spans) + [-1] * len(spans))
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order])


def _seconds(rank: ProcessStep, track: str, names: set[str]) -> float:
    return sum(span.seconds for span in rank.spans if span.track == track and span.name in names)


def tensor_seconds(ranks: Sequence[ProcessStep], *, layers: int) -> float | None:
    """Estimated: the measured all-reduce, scaled by bytes to all that the passes make: two in forward and two in
    backward of each of the rank's layers. Recomputation is not counted."""
    total = 0.0
    for rank in ranks:
        probe = next((span.about for span in rank.spans if span.track == "probe"), None)
        if probe is None:
            return None
        most = max(span.about.get("tokens", 0) for span in rank.spans if span.track == UPDATE)
        tokens = sum(
            span.about.get("tokens", 0) for span in rank.spans if span.track == UPDATE and span.name == PASSES[0]
        )
        total += probe["seconds"] * (tokens / most) * 4 * layers / (rank.about["stages"] * rank.about["chunks"])
    return total


def _imbalance(steps: Sequence[RecordedStep]) -> float | None:
    """Passes of the slowest data-parallel rank over their mean, less 1: of each optimizer step and stage, summed."""
    slowest = mean = 0.0
    for step in steps:
        by_stage: dict[tuple[int, ...], list[list[float]]] = defaultdict(list)
        for rank in step.ranks:
            place = rank.about
            by_stage[place["pipeline"], place["tensor"], place["context"]].append(_by_optimizer_step(rank))
        for data_ranks in by_stage.values():
            if len(data_ranks) < 2:
                return None
            seconds = np.array(data_ranks)
            slowest += seconds.max(axis=0).sum()
            mean += seconds.mean(axis=0).sum()
    return slowest / mean - 1 if mean else None


def _by_optimizer_step(rank: ProcessStep) -> list[float]:
    whole = [span for span in rank.spans if span.track == UPDATE and span.name == SCHEDULE]
    passes = [span for span in rank.spans if span.track == UPDATE and span.name in PASSES]
    return [sum(one.seconds for one in passes if each.start <= one.start < each.end) for each in whole]


def _tail(steps: Sequence[RecordedStep], share: float) -> float | None:
    """Seconds of the rollout phases with fewer responses under way than `share` of the fullest moment's, over all."""
    low = whole = 0.0
    for step in steps:
        for phase in (span for span in step.phases if span.name == "rollout"):
            spans = [span for spans in step.requests.values() for span in spans if span.start < phase.end]
            if not spans:
                return None
            times, counts = running(spans)
            edges = np.clip(np.append(times, phase.end), phase.start, phase.end)
            few = counts < share * counts.max()
            low += float(np.diff(edges)[few].sum()) + max(0.0, edges[0] - phase.start)
            whole += phase.seconds
    return over(low, whole)


def _server_imbalance(steps: Sequence[RecordedStep], servers: int) -> float | None:
    """Tokens of the server that wrote most in each step over the mean, less 1."""
    written = [[sum(span.about["tokens"] for span in spans) for spans in step.requests.values()] for step in steps]
    total = sum(map(sum, written))
    return sum(map(max, filter(None, written))) * servers / total - 1 if servers > 1 and total else None


def over(total: float, by: float) -> float | None:
    """The share, or the speed; None where nothing is known to divide by."""
    return total / by if by > 0 else None


def rank_rows(steps: Sequence[RecordedStep]) -> list[dict[str, Any]]:
    """One row a rank: its place, seconds of update, share of it in passes, most memory and in which call."""
    rows: dict[int, dict[str, Any]] = {}
    for step in steps:
        for rank in step.ranks:
            row = rows.setdefault(rank.about["rank"], {"place": rank.about, "update": 0.0, "compute": 0.0, "peak": {}})
            row["update"] += _seconds(rank, "calls", {UPDATE})
            row["compute"] += _seconds(rank, UPDATE, set(PASSES))
            for call, most in peaks(rank).items():
                row["peak"][call] = max(row["peak"].get(call, 0.0), most)
    return [rows[rank] for rank in sorted(rows)]
