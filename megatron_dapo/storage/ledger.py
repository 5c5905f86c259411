"""The ledger: an append-only record of what became of every prompt (law 4: none lost, none trained twice).

One JSON object a line. `prompt` is a position in the endless shuffled order. The life of a position:

    dispatched -> finished -> trained                 kept and used by an optimizer step
                           -> filtered                all responses right or all wrong
                           -> carried -> trained ...  finished past the end of a full batch, first in line for the next
               -> expired -> dispatched               its weights became too old, finished or not: generated again
    retired                                           its prompt is not sent at this turn: passed over

A run that was ended and resumed goes on from its newest checkpoint: the event `resumed` voids what was written after
that checkpoint, and what belongs to later steps than it; `effective_events` gives what stands. What
was in flight at the checkpoint is `interrupted` there: its responses are gone, and it is dispatched again; but what
`resumed` names as `continued` goes on from what was saved of it. Of a rollout that was saved in its middle, positions
that the checkpoint does not know are dispatched and finished once more in the ledger, though not by the servers.
"""

import json
import os
from collections.abc import Collection, Iterable
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


LINE = "line"
"""Its number, in each line, so that one that is lost is missed; older lines have none."""


class LedgerError(RuntimeError):
    """The ledger contradicts itself. The message names the line."""

    exit_code = 2


class Ledger:
    """Appends events; `commit` makes them durable. Single writer: the coordinator."""

    def __init__(self, path: Path) -> None:
        self._path = path
        drop_torn_line(path)  # it was never committed, so nothing rests on it
        self._lines = sum(1 for _ in whole_lines(path)) if path.exists() else 0
        # Only `commit` writes: when that fails, as on a full disk, the rest stays here and goes on at the right byte.
        self._file = path.open("a", 1 << 26, encoding="utf-8")

    def record(
        self, event: Event, *, rollout_step: int, weight_version: int, prompt: int | None = None, **details: Any
    ) -> None:
        """Append one event. `prompt` is the position in the shuffled order; none for events of the whole run."""
        self._lines += 1
        about: dict[str, Any] = {"rollout_step": rollout_step, "weight_version": weight_version}
        about |= details | {LINE: self._lines}
        with naming(self._path):
            self._file.write(json.dumps({"event": event, "prompt": prompt} | about) + "\n")

    def commit(self) -> None:
        """Returns when everything recorded is on disk."""
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self.commit()
        self._file.close()


def read_ledger(path: Path, kinds: Collection[str] | None = None) -> list[dict[str, Any]]:
    """All events as written, a torn last line left out; of a long run `kinds` alone.

    Raises:
        LedgerError: a line in the middle that is no event in JSON, or that follows one that is gone.
    """
    events: list[dict[str, Any]] = []
    for number, (place, line) in enumerate(whole_lines(path), start=1):
        try:
            event = json.loads(line)
            kind, written = event["event"], event.pop(LINE, number)
        except (ValueError, TypeError, KeyError) as error:
            raise LedgerError(f"{place}: not an event ({error!r}); restore the file from a copy") from None
        if written != number:
            told = f"was line {written} when it was written: others were lost or added since"
            raise LedgerError(f"{place}: {told}; restore the file from a copy")
        if kinds is None or kind in kinds:
            events.append(event)
    return events


def effective_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that stand: those after a checkpoint that a later resume went back behind are left out.

    Where a checkpoint was resumed from, each position without a fate by then gets an event `interrupted`, unless the
    resume goes on from its tokens.
    """
    standing: list[dict[str, Any]] = []
    for event in events:
        if event["event"] != Event.RESUMED:
            standing.append(event)
            continue
        step, saved = event["rollout_step"], 0
        for at, earlier in enumerate(standing, start=1):
            if earlier["event"] == Event.CHECKPOINT and earlier["rollout_step"] == step:
                saved = at
        # A run that stops in the middle of a step saves what stood before it, after events of that step.
        standing = [earlier for earlier in standing[:saved] if earlier["rollout_step"] <= step]
        last = {earlier["prompt"]: at for at, earlier in enumerate(standing) if earlier["prompt"] is not None}
        kinds = {prompt: standing[at]["event"] for prompt, at in last.items()}
        goes_on = event.get("continued", ())
        # What is finished was so after the checkpoint's content was fixed: lost, or finished anew from its tokens.
        again = {last[prompt] for prompt in goes_on if kinds.get(prompt) == Event.FINISHED}
        standing = [earlier for at, earlier in enumerate(standing) if at not in again]
        lost = [prompt for prompt, kind in kinds.items() if kind in (Event.DISPATCHED, Event.FINISHED)]
        lost = [prompt for prompt in lost if prompt not in set(goes_on)]
        standing += [event | {"event": Event.INTERRUPTED, "prompt": prompt} for prompt in lost]
    return standing
