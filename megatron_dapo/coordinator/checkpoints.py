"""Checkpoints of a run: trainer, sampler and counters together, so that a resumed run knows of every prompt.

One is begun when a step is over, and counts once its folder has its name. In between the trainer's ranks write it while
the run goes on: at most one at a time. A damaged one is named by its file when a run would go on from it, and the
newest intact one before it is found.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_dapo.cluster.trainer import Diverged, TrainerError, TrainerLost, TrainerStalled
from megatron_dapo.cluster.waits import StopRequested
from megatron_dapo.config.run_config import RunConfig
from megatron_dapo.coordinator.progress import Progress, save_progress
from megatron_dapo.coordinator.services import Services
from megatron_dapo.monitor.console import Console
from megatron_dapo.storage.ledger import Event, Ledger
from megatron_dapo.storage.run_dir import RunDir

POLL_S = 0.5
"""Between two questions whether the ranks have finished writing."""

GRACE_S = 60.0
"""For a checkpoint under way when a trainer rank fails: the others may wait for that rank, and never answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A checkpoint that has all it will hold, and does not count yet."""

    progress: Progress
    folder: Path
    in_background: bool


class Checkpoints:
    """The run's checkpoints. A context: what is under way when the run ends is finished, or said to be lost."""

    def __init__(
        self, config: RunConfig, run_dir: RunDir, services: Services, ledger: Ledger, console: Console
    ) -> None:
        self._config, self._run_dir, self._ledger, self._console = config, run_dir, ledger, console
        self._trainer, self._waits, self._handover = services.trainer, services.waits, services.handover
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, progress: Progress, *, wait: bool) -> Begun:
        """Take what a checkpoint holds; the trainer's weights must be those of `progress`. An earlier one is finished
        first.

        Args:
            wait: until everything is written, whatever the config says.

        Raises:
            TrainerError: this one, or an earlier one, could not be written.
        """
        await self.finish()
        folder = self._run_dir.checkpoint_aside(progress.rollout_step)
        background = self._config.checkpoint_in_background and not wait
        try:
            if background:
                background = await self._trainer.begin_checkpoint(folder / "actor")
            else:
                await self._trainer.save_checkpoint(folder / "actor")
        except TrainerError as error:
            raise _with_room(error, folder) from None
        save_progress(progress, folder)
        return Begun(progress=progress, folder=folder, in_background=background)

    async def publish(self, begun: Begun) -> None:
        """Let it count as soon as it is written: from then on a resume starts here.

        The ledger's event comes before the rename: a kill in between leaves an event without a folder, which the next
        resume voids. The other order would leave a folder that the ledger does not know.
        """
        progress = begun.progress
        self._ledger.record(
            Event.CHECKPOINT,
            rollout_step=progress.rollout_step,
            weight_version=progress.weight_version,
            optimizer_step=progress.optimizer_step,
        )
        self._ledger.commit()
        self._writing = asyncio.create_task(self._complete(begun))
        if not begun.in_background:
            await self.finish()

    async def finish(self) -> None:
        """Wait for the checkpoint that is under way, if there is one.

        Raises:
            TrainerError: it could not be written. Earlier ones stand.
            Stalled: a rank did not get it written in time.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    @asynccontextmanager
    async def kept_on_failure(self, progress: Progress) -> AsyncIterator[None]:
        """A body that changes no weights. If it fails, or is asked to stop, what stood before it is saved."""
        try:
            yield
        except (TrainerError, TrainerStalled):
            raise  # nobody is left who could save
        except StopRequested:
            await self.keep(progress)  # a save that fails is an error: "stopped" says that everything is saved
            raise
        except Exception:
            try:
                await self.keep(progress)
            except Exception as error:  # must not hide why the run ends
                self._console.note(f"what stood before this step could not be saved: {error}")
            raise

    async def keep(self, progress: Progress) -> None:
        """A checkpoint between two rollout steps, unless there is one; nothing is trained before the first step."""
        async with self._handover.trainer():
            await self.finish()
            newest = self._run_dir.latest_checkpoint()
            if progress.rollout_step > (newest.step if newest else 0):
                await self.publish(await self.begin(progress, wait=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Never raises: it is called on the way out."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        await asyncio.wait([writing], timeout=self._patience(error))
        writing.cancel()
        (lost,) = await asyncio.gather(writing, return_exceptions=True)
        if lost is not None and lost is not error:
            reason = "the run ended first" if isinstance(lost, asyncio.CancelledError) else lost
            self._console.note(f"the checkpoint that was being written is lost: {reason}")

    def _patience(self, error: BaseException | None) -> float | None:
        """Seconds that the checkpoint under way may take when the run ends with `error`."""
        if isinstance(error, asyncio.CancelledError | TrainerLost | TrainerStalled):
            return 0.0
        if isinstance(error, TrainerError) and not isinstance(error, Diverged):
            return GRACE_S
        return None  # its own deadline

    async def _complete(self, begun: Begun) -> None:
        """Put a checkpoint in its place once it is written. A failure ends whatever the run waits for."""
        step = begun.progress.rollout_step
        # A question that comes while the ranks are at work waits until they are done.
        deadline = 2 * self._config.step_deadline_s
        try:
            await self._waits.wait_for(
                f"checkpoint of step {step}", "the trainer ranks' writers", deadline, self._until_written()
            )
            self._run_dir.publish_checkpoint(begun.folder, step, self._config.keep_checkpoints)
        except Exception as error:
            failure = _with_room(error, begun.folder) if isinstance(error, TrainerError) else error
            self._waits.lose(failure)
            raise failure from None

    async def _until_written(self) -> None:
        while not await self._trainer.finish_checkpoint(wait=False):
            await asyncio.sleep(POLL_S)


def _with_room(error: TrainerError, folder: Path) -> TrainerError:
    """The same, with how full the disk is, unless the ranks themselves are lost."""
    if isinstance(error, TrainerLost):
        return error
    free = shutil.disk_usage(folder).free / 1e6
    return TrainerError(f"{error}\n{folder}: its disk has {free:.0f} MB free; what was saved before stands")
