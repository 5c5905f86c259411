"""Old log-probs: computed by the trainer while the batch is still being filled, then compared with the engine's.

The trainer would otherwise wait for the slowest response. Kept groups are known in prompt order long before the batch
is full, and the weights do not change meanwhile. Every `CHUNKS`-th part of the batch is sent to the trainer as soon as
it is kept. The chunks depend on the order of prompts alone, never on time: a resumed run computes the same numbers,
bit for bit.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from megatron_dapo.actor.step_data import LogProbs
from megatron_dapo.algorithm.importance import Mismatch, mismatch
from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.config import Config
from megatron_dapo.config.run_config import MonitorConfig
from megatron_dapo.coordinator.batch import StepArrays, responses_of
from megatron_dapo.experience.groups import Admission, ScoredGroup
from megatron_dapo.monitor.console import Console

CHUNKS = 8
"""A full batch is computed in so many pieces."""


def chunk_size(groups: int) -> int:
    """Groups in one chunk of a full batch of `groups`."""
    return -(-groups // CHUNKS)


def joined(chunks: Sequence[LogProbs]) -> LogProbs:
    """The chunks as one, in order."""
    return LogProbs(
        log_probs=np.concatenate([chunk.log_probs for chunk in chunks]),
        entropy=np.concatenate([chunk.entropy for chunk in chunks]),
    )


class LogProbStream:
    """Log-probs of the groups given to `add`, in that order. Use as a context: what is under way ends with it."""

    def __init__(self, trainer: Trainer, config: Config) -> None:
        self._trainer = trainer
        self._chunk_size = chunk_size(config.algorithm.prompts_per_step)
        self._wait = config.run.mode == "colocated"
        """Nothing is sent before `finish`, while the servers have the memory; the chunks are the same."""
        self._waiting: list[ScoredGroup] = []
        self._chunks: list[asyncio.Task[LogProbs]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for chunk in self._chunks:
            chunk.cancel()
        await asyncio.gather(*self._chunks, return_exceptions=True)

    def add(self, group: ScoredGroup) -> None:
        """The next kept group."""
        self._waiting.append(group)
        if len(self._waiting) == self._chunk_size and not self._wait:
            self._send()

    async def finish(self) -> LogProbs:
        """Of all groups, [N] in the order of `add`.

        Raises:
            TrainerError: a rank failed, now or while the batch was filled.
        """
        while self._waiting:
            self._send()
        return joined(await asyncio.gather(*self._chunks))

    def _send(self) -> None:
        responses = responses_of(self._waiting[: self._chunk_size])
        del self._waiting[: self._chunk_size]
        self._chunks.append(asyncio.create_task(self._trainer.log_probs(responses)))


class MismatchStop(RuntimeError):
    """Engine and trainer disagree so much that they cannot hold the same model."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Engine against trainer on the same tokens."""

    current: Mismatch
    """Tokens written by the weights that the trainer holds: only kernels differ."""
    stale: Mismatch
    """Tokens written by older weights."""
    stale_share: float
    """Share of the tokens that are stale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilledBatch:
    """N groups, and the trainer's log-probs of their tokens before any update."""

    admission: Admission
    arrays: StepArrays
    old: LogProbs
    gap: Gap


def check_mismatch(
    old: LogProbs, arrays: StepArrays, weight_version: int, limits: MonitorConfig, console: Console
) -> Gap:
    """The gap between engine and trainer, apart for tokens of the current weights and of older ones.

    Where all tokens are older (`async` with fast servers), their gap is judged by the upper limit: it has the update in
    it, which is far below that.

    Raises:
        MismatchStop: it is above `monitor.mismatch_stop` on tokens of the current weights, or of older ones if there
            are no others.
    """
    trainer, engine = torch.tensor(old.log_probs), torch.tensor(arrays.rollout_log_probs)
    current = torch.from_numpy(arrays.weight_versions == weight_version)
    gap = Gap(
        current=mismatch(trainer[current], engine[current]),
        stale=mismatch(trainer[~current], engine[~current]),
        stale_share=float((~current).double().mean()),
    )
    judged, of = (gap.current, "") if gap.stale_share < 1 else (gap.stale, " of tokens that older weights wrote")
    mean_abs = judged.mean_abs
    if not mean_abs <= limits.mismatch_stop:  # also when it is not a number
        raise MismatchStop(
            f"mean |engine - trainer| log-prob{of} is {mean_abs:.3g}, above monitor.mismatch_stop = "
            f"{limits.mismatch_stop:g}: the servers do not hold the trainer's model"
        )
    if judged is gap.current and mean_abs > limits.mismatch_warn:
        console.note(f"warning: mean |engine - trainer| log-prob is {mean_abs:.3g} (monitor.mismatch_warn)")
    return gap
