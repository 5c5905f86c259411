"""The events of a ledger that stand, where a run was resumed from an older checkpoint."""

from collections.abc import Iterable
from typing import Any

from megatron_dapo.storage.ledger import Event


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
