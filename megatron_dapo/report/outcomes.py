"""The events of a ledger that stand, where a run was resumed from an older checkpoint."""

from collections.abc import Iterable
from typing import Any

from megatron_dapo.storage.ledger import Event


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
        step = event["rollout_step"]
        saved = (
            at
            for at, earlier in enumerate(standing, start=1)
            if earlier["event"] == Event.CHECKPOINT and earlier["rollout_step"] == step
        )
        # A run that stops in the middle of a step saves what stood before it, after events of that step.
        standing = [earlier for earlier in standing[: max(saved, default=0)] if earlier["rollout_step"] <= step]
        last = {earlier["prompt"]: at for at, earlier in enumerate(standing) if earlier["prompt"] is not None}
        kinds, goes_on = {prompt: standing[at]["event"] for prompt, at in last.items()}, event.get("continued", ())
        # What is finished was so after the checkpoint's content was fixed: lost, or finished anew from its tokens.
        again = {last[prompt] for prompt in goes_on if kinds.get(prompt) == Event.FINISHED}
        standing = [earlier for at, earlier in enumerate(standing) if at not in again]
        lost = [prompt for prompt, kind in kinds.items() if kind in (Event.DISPATCHED, Event.FINISHED)]
        lost = [prompt for prompt in lost if prompt not in set(goes_on)]
        standing += [event | {"event": Event.INTERRUPTED, "prompt": prompt} for prompt in lost]
    return standing
