"""The ledger: an append-only record of what became of every prompt (law 4: none lost, none trained twice).

One JSON object a line. `prompt` is a position in the endless shuffled order. The life of a position:

    dispatched -> finished -> trained                 kept and used by an optimizer step
                           -> filtered                all responses right or all wrong
                           -> carried -> trained ...  finished past the end of a full batch, first in line for the next
               -> expired -> dispatched               its weights became too old, finished or not: generated again
    retired                                           its prompt is not sent at this turn: passed over

A run that was ended and resumed goes on from its newest checkpoint: the event `resumed` voids what was written after
that checkpoint, and what belongs to later steps than it; report/outcomes.py: effective_events gives what stands. What
was in flight at the checkpoint is `interrupted` there: its responses are gone, and it is dispatched again; but what
`resumed` names as `continued` goes on from the tokens that the checkpoint has.
"""

import json
import os
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_dapo.storage.durable import drop_torn_line, naming, whole_lines


class Event(StrEnum):
    DISPATCHED = "dispatched"
    FINISHED = "finished"
    FILTERED = "filtered"
    CARRIED = "carried"
    EXPIRED = "expired"
    RETIRED = "retired"
    INTERRUPTED = "interrupted"
    """Never written: what `effective_events` finds in flight at a checkpoint that was resumed from."""
    TRAINED = "trained"
    CHECKPOINT = "checkpoint"
    RESUMED = "resumed"


class LedgerError(RuntimeError):
    """The ledger contradicts itself. The message names the line."""

    exit_code = 2


class Ledger:
    """Appends events; `commit` makes them durable. Single writer: the coordinator."""

    def __init__(self, path: Path) -> None:
        self._path = path
        drop_torn_line(path)  # it was never committed, so nothing rests on it
        self._file = path.open("a", encoding="utf-8")

    def record(
        self, event: Event, *, rollout_step: int, weight_version: int, prompt: int | None = None, **details: Any
    ) -> None:
        """Append one event. `prompt` is the position in the shuffled order; none for events of the whole run."""
        about = {"rollout_step": rollout_step, "weight_version": weight_version}
        with naming(self._path):
            self._file.write(json.dumps({"event": event, "prompt": prompt} | about | details) + "\n")

    def commit(self) -> None:
        """Returns when everything recorded is on disk."""
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.commit()
            self._file.close()


def read_ledger(path: Path, kinds: Collection[str] | None = None) -> list[dict[str, Any]]:
    """All events as written, a torn last line left out; of a long run `kinds` alone.

    Raises:
        LedgerError: a line in the middle that is no event in JSON.
    """
    events: list[dict[str, Any]] = []
    for place, line in whole_lines(path):
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError) as error:
            raise LedgerError(f"{place}: not an event ({error!r}); restore the file from a copy") from None
        if kinds is None or kind in kinds:
            events.append(event)
    return events
