"""What became of every prompt that was sent and of every token that was generated, counted from a ledger."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.storage.ledger import Event, effective_events, read_ledger

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


def count_outcomes(path: Path) -> Outcomes:
    """Outcomes by the events that stand."""
    now: dict[int, str] = {}
    waiting: dict[int, int] = {}
    tokens: Counter[str] = Counter()
    for event in effective_events(read_ledger(path)):
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
    tokens[WAITING] = sum(waiting.values())
    prompts = Counter(now.values())
    return Outcomes(
        prompts={each: prompts[each] for each in (TRAINED, ALL_RIGHT, ALL_WRONG, WAITING, UNFINISHED)},
        tokens={each: tokens[each] for each in (TRAINED, ALL_RIGHT, ALL_WRONG, WAITING, AGAIN)},
    )
