"""What became of every prompt that was sent and of every token that was generated, from the ledger."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.storage.ledger import Event, LedgerError, read_ledger

TRAINED, ALL_RIGHT, ALL_WRONG = "trained", "all right", "all wrong"
WAITING, UNFINISHED, AGAIN = "waiting", "in flight", "generated again"


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Counts by outcome. {"trained": 384, "all right": 60, ...}"""

    prompts: dict[str, int]
    """Each dispatched prompt once, by where it stands now."""
    tokens: dict[str, int]
    """Each generated response token once; `generated again`: of groups whose weights had become too old,
    or which no checkpoint held when the run was resumed."""
    groups: dict[int, list[int]]
    """Prompt -> right responses in each of its groups that was decided, oldest first. Ledgers of older versions name
    positions alone."""


def count_outcomes(path: Path, notes: list[str]) -> Outcomes | None:
    """Outcomes by the events that stand; None, with a line in `notes` if it is broken, where there is no ledger."""
    if not path.exists():
        return None
    try:
        events = effective_events(read_ledger(path))
    except (LedgerError, KeyError, TypeError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return None
    now: dict[int, str] = {}
    waiting: dict[int, int] = {}
    tokens: Counter[str] = Counter()
    groups: dict[int, list[int]] = {}
    for event in events:
        prompt, kind = event.get("prompt"), event.get("event")
        if prompt is None:
            continue
        if kind in (Event.DISPATCHED, Event.EXPIRED, Event.INTERRUPTED):
            tokens[AGAIN] += waiting.pop(prompt, 0)
            now[prompt] = UNFINISHED
        elif kind in (Event.FINISHED, Event.CARRIED):
            waiting[prompt] = event.get("tokens", 0)
            now[prompt] = WAITING
        elif kind == Event.RETIRED:
            now.pop(prompt, None)
        elif kind in (Event.TRAINED, Event.FILTERED):
            now[prompt] = TRAINED if kind == Event.TRAINED else ALL_RIGHT if event.get("correct") else ALL_WRONG
            tokens[now[prompt]] += waiting.pop(prompt, event.get("tokens", 0))
            if isinstance(row := event.get("row"), int) and isinstance(right := event.get("correct"), int):
                groups.setdefault(row, []).append(right)
    tokens[WAITING] = sum(waiting.values())
    prompts = Counter(now.values())
    return Outcomes(
        prompts={each: prompts[each] for each in (TRAINED, ALL_RIGHT, ALL_WRONG, WAITING, UNFINISHED)},
        tokens={each: tokens[each] for each in (TRAINED, ALL_RIGHT, ALL_WRONG, WAITING, AGAIN)},
        groups=groups,
    )


def effective_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that stand: those after a checkpoint that a later resume went back behind are left out.

    Where a checkpoint was resumed from, each position without a fate by then gets an event `interrupted`.
    """
    standing: list[dict[str, Any]] = []
    for event in events:
        if event["event"] != Event.RESUMED:
            standing.append(event)
            continue
        step = event["rollout_step"]
        saved = (
            at
            for at, earlier in enumerate(standing, start=1)
            if earlier["event"] == Event.CHECKPOINT and earlier["rollout_step"] == step
        )
        # A run that stops in the middle of a step saves what stood before it, after events of that step.
        standing = [earlier for earlier in standing[: max(saved, default=0)] if earlier["rollout_step"] <= step]
        last = {earlier["prompt"]: earlier["event"] for earlier in standing if earlier["prompt"] is not None}
        # Also what is finished: that was after the checkpoint's content was fixed.
        lost = [prompt for prompt, kind in last.items() if kind in (Event.DISPATCHED, Event.FINISHED)]
        standing += [event | {"event": Event.INTERRUPTED, "prompt": prompt} for prompt in lost]
    return standing
