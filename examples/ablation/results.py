"""Finished runs as figures: held-out accuracy, and what the last third of the rollout steps looked like."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.ablation.rungs import Planned
from examples.ablation.runs import FAILURE
from megatron_dapo.monitor.writer import Line, read_metrics
from megatron_dapo.storage.ledger import Event, effective_events, read_ledger

LATE = 1 / 3
"""The share of the rollout steps, or of the tokens, whose rollouts stand for where a run came to: a single step has too
few responses to tell."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run that came to its end."""

    rung: str
    seed: int
    lines: Sequence[Line]
    summary: Mapping[str, Any]
    groups: Mapping[int, tuple[int, int]]
    """Rollout step -> (useless, decided): groups that were all right or all wrong, and all of them. Without dynamic
    sampling the metrics do not tell: there every group is kept."""
    failure: str = ""
    """Why it has no figures: it diverged, or nothing was left to learn from."""


def read_outcomes(runs: Sequence[Planned]) -> list[Outcome]:
    """Of every run that is finished or failed; those that are not done yet are left out."""
    found = []
    for run in runs:
        failure, summary = run.folder / FAILURE, run.folder / "summary.json"
        if failure.exists():
            error = json.loads(failure.read_text())["error"]
            found.append(_outcome(run, {}, failure=error.splitlines()[0]))
        elif summary.exists():
            found.append(_outcome(run, json.loads(summary.read_text())))
    return found


def _outcome(run: Planned, summary: Mapping[str, Any], *, failure: str = "") -> Outcome:
    return Outcome(
        rung=run.rung.name,
        seed=run.seed,
        lines=read_metrics(run.folder),
        summary=summary,
        groups=decided_groups(run.folder / "ledger.jsonl", run.config().algorithm.group_size),
        failure=failure,
    )


def decided_groups(ledger: Path, group_size: int) -> dict[int, tuple[int, int]]:
    """Rollout step -> (useless, decided) groups, from the events that stand."""
    counts: dict[int, tuple[int, int]] = {}
    if not ledger.exists():
        return counts
    for event in effective_events(read_ledger(ledger)):
        if event["event"] in (Event.TRAINED, Event.FILTERED):
            useless, decided = counts.get(event["rollout_step"], (0, 0))
            counts[event["rollout_step"]] = (useless + (event["correct"] in (0, group_size)), decided + 1)
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One figure of a finished run."""

    key: str
    label: str
    percent: bool
    digits: int
    of: Callable[[Outcome], float]


def late_lines(lines: Sequence[Line]) -> Sequence[Line]:
    """The last third of the rollout steps."""
    return lines[-max(1, round(len(lines) * LATE)) :]


def weighted(lines: Sequence[Line], name: str, weight: str) -> float:
    """Mean of a metric over steps of unlike size: sum of value x weight / sum of weights."""
    known = [line for line in lines if line.get(name) is not None]
    total = sum(line[weight] for line in known)
    return sum(line[name] * line[weight] for line in known) / total if total else 0.0


def useless_share(outcome: Outcome, lines: Sequence[Line]) -> float:
    """Groups that were all right or all wrong, among those decided in these steps."""
    counts = [outcome.groups.get(line["rollout_step"], (0, 0)) for line in lines]
    decided = sum(all_of_them for _, all_of_them in counts)
    return sum(useless for useless, _ in counts) / decided if decided else 0.0


def cumulative_tokens(lines: Sequence[Line]) -> list[float]:
    """Tokens generated up to and with each step."""
    total, sums = 0.0, []
    for line in lines:
        total += line["tokens/generated"]
        sums.append(total)
    return sums


def accuracy_at(lines: Sequence[Line], budget: float) -> float:
    """Accuracy of the rollouts of the last third of `budget` generated tokens.

    Raises:
        ValueError: the run generated fewer tokens than that.
    """
    sums = cumulative_tokens(lines)
    if not sums or sums[-1] < budget:
        raise ValueError(f"{sums[-1] if sums else 0:g} tokens were generated, {budget:g} are asked for")
    end = next(at for at, total in enumerate(sums) if total >= budget)
    begin = next(at for at, total in enumerate(sums) if total > budget * (1 - LATE))
    return weighted(lines[begin : end + 1], "accuracy/mean", "sampling/generated")


def _heldout(way: str) -> Callable[[Outcome], float]:
    return lambda outcome: outcome.summary["heldout"]["after"][way]["accuracy"]


def _late(name: str, weight: str) -> Callable[[Outcome], float]:
    return lambda outcome: weighted(late_lines(outcome.lines), name, weight)


SAMPLED = Measure(key="sampled", label="held-out, sampled", percent=True, digits=1, of=_heldout("sampled"))
GREEDY = Measure(key="greedy", label="held-out, greedy", percent=True, digits=1, of=_heldout("greedy"))
ROLLOUTS = Measure(
    key="rollouts", label="rollouts, late", percent=True, digits=1, of=_late("accuracy/mean", "sampling/generated")
)
ENTROPY = Measure(key="entropy", label="entropy, nats", percent=False, digits=3, of=_late("entropy", "tokens/trained"))
LENGTH = Measure(
    key="length", label="length", percent=False, digits=1, of=_late("response_length/mean", "sampling/generated")
)
TRUNCATED = Measure(
    key="truncated", label="cut off", percent=True, digits=1, of=_late("truncated_fraction", "sampling/generated")
)
USELESS_SHARE = Measure(
    key="useless",
    label="useless groups",
    percent=True,
    digits=1,
    of=lambda outcome: useless_share(outcome, late_lines(outcome.lines)),
)
TOKENS = Measure(
    key="tokens",
    label="tokens generated, k",
    percent=False,
    digits=0,
    of=lambda outcome: outcome.summary["tokens"]["generated"] / 1000,
)
SECONDS_OF_TRAINING = Measure(
    key="seconds",
    label="training, s",
    percent=False,
    digits=0,
    of=lambda outcome: outcome.summary["seconds"]["step"],
)
MEASURES = (SAMPLED, GREEDY, ROLLOUTS, ENTROPY, LENGTH, TRUNCATED, USELESS_SHARE, TOKENS, SECONDS_OF_TRAINING)
