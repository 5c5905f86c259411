"""Law 4 on a ledger: no position is lost, trained twice, sent twice or skipped."""

from collections.abc import Iterable
from typing import Any

from megatron_dapo.storage.ledger import Event, LedgerError, effective_events


def check_ledger(events: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Fate of every dispatched position among `effective_events`.

    Raises:
        LedgerError: a position trained twice, sent twice, decided without being finished, or skipped.
    """
    fates: dict[int, str] = {}
    allowed: dict[Event, set[str | None]] = {
        Event.DISPATCHED: {None, Event.EXPIRED, Event.INTERRUPTED, Event.RETIRED},
        Event.RETIRED: {None, Event.EXPIRED, Event.INTERRUPTED, Event.RETIRED},
        Event.FINISHED: {Event.DISPATCHED},
        Event.TRAINED: {Event.FINISHED, Event.CARRIED},
        Event.FILTERED: {Event.FINISHED, Event.CARRIED},
        Event.CARRIED: {Event.FINISHED, Event.CARRIED},
        Event.EXPIRED: {Event.DISPATCHED, Event.FINISHED, Event.CARRIED},
        Event.INTERRUPTED: {Event.DISPATCHED, Event.FINISHED},
    }
    for number, event in enumerate(effective_events(events), start=1):
        position, kind = event["prompt"], Event(event["event"])
        if position is None:
            continue
        before = fates.get(position)
        if before not in allowed[kind]:
            raise LedgerError(f"event {number}: prompt {position} is {kind} after {before or 'nothing'}")
        fates[position] = kind
    if fates and set(fates) != set(range(max(fates) + 1)):
        missing = sorted(set(range(max(fates) + 1)) - set(fates))
        raise LedgerError(f"prompts {missing[:10]} of the order were never dispatched, but later ones were")
    return fates
