"""Old log-probs while the batch is still being filled: the trainer would otherwise wait for the slowest response.

Kept groups are known in prompt order long before the batch is full, and the weights do not change meanwhile. Every
`CHUNKS`-th part of the batch is sent to the trainer as soon as it is kept. The parts depend on the order of prompts
alone, never on time, so a resumed run computes the same numbers, bit for bit.
"""

import asyncio
from collections.abc import Sequence
from typing import Self

import numpy as np

from megatron_dapo.actor.step_data import LogProbs
from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.coordinator.batch import responses_of
from megatron_dapo.experience.groups import ScoredGroup

CHUNKS = 8
"""Parts that a full batch is computed in."""


def chunk_size(groups: int) -> int:
    """Groups of one part of a full batch of so many."""
    return -(-groups // CHUNKS)


def joined(parts: Sequence[LogProbs]) -> LogProbs:
    """The parts as one, in order."""
    return LogProbs(
        log_probs=np.concatenate([part.log_probs for part in parts]),
        entropy=np.concatenate([part.entropy for part in parts]),
    )


class LogProbStream:
    """Log-probs of the groups given to `add`, in that order. Use as a context: what is under way ends with it."""

    def __init__(self, trainer: Trainer, *, groups: int, wait: bool = False) -> None:
        """
        Args:
            groups: how many a full batch has.
            wait: nothing is sent before `finish`; the parts are the same.
        """
        self._trainer = trainer
        self._chunk, self._wait = chunk_size(groups), wait
        self._waiting: list[ScoredGroup] = []
        self._parts: list[asyncio.Task[LogProbs]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for part in self._parts:
            part.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)

    def add(self, group: ScoredGroup) -> None:
        """The next kept group."""
        self._waiting.append(group)
        if len(self._waiting) == self._chunk and not self._wait:
            self._send()

    async def finish(self) -> LogProbs:
        """Of all groups, [N] in the order of `add`.

        Raises:
            TrainerError: a rank failed, now or while the batch was filled.
        """
        while self._waiting:
            self._send()
        return joined(await asyncio.gather(*self._parts))

    def _send(self) -> None:
        responses = responses_of(self._waiting[: self._chunk])
        del self._waiting[: self._chunk]
        self._parts.append(asyncio.create_task(self._trainer.log_probs(responses)))
