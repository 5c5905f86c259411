"""One checkpoint: trainer, sampler and counters together, so that a resumed run knows of every prompt."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.coordinator.parts import Parts
from megatron_dapo.coordinator.progress import Progress, save_progress
from megatron_dapo.coordinator.trainer import TrainerError, TrainerLost
from megatron_dapo.data.ledger import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpublished:
    """A checkpoint that is whole but does not count yet."""

    progress: Progress
    folder: Path


async def save_checkpoint(parts: Parts, progress: Progress) -> Unpublished:
    """Write everything aside. The trainer's weights must be those of `progress`."""
    aside = parts.run_dir.checkpoint_aside(progress.rollout_step)
    try:
        await parts.services.trainer.save_checkpoint(aside / "actor")
    except TrainerLost:
        raise
    except TrainerError as error:  # torch says of a full disk "unexpected pos 704 vs 598"
        free = shutil.disk_usage(aside).free / 1e6
        raise TrainerError(f"{error}\n{aside}: its disk has {free:.0f} MB free; what was saved before stands") from None
    save_progress(progress, aside)
    return Unpublished(progress=progress, folder=aside)


def publish_checkpoint(parts: Parts, saved: Unpublished) -> None:
    """Make it count: from now on a resume starts here.

    The ledger's event comes before the rename: a kill in between leaves an event without a folder, which the next
    resume voids. The other order would leave a folder that the ledger does not know.
    """
    progress = saved.progress
    parts.services.ledger.record(
        Event.CHECKPOINT,
        rollout_step=progress.rollout_step,
        weight_version=progress.weight_version,
        optimizer_step=progress.optimizer_step,
    )
    parts.services.ledger.commit()
    parts.run_dir.publish_checkpoint(saved.folder, progress.rollout_step, parts.config.run.keep_checkpoints)


async def keep_what_stands(parts: Parts, progress: Progress) -> None:
    """A checkpoint between two rollout steps, unless there is one; nothing has been trained before the first step."""
    newest = parts.run_dir.latest_checkpoint()
    if progress.rollout_step > (newest.step if newest else 0):
        publish_checkpoint(parts, await save_checkpoint(parts, progress))
