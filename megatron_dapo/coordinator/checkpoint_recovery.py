"""What a resume does about a checkpoint with a damaged file: it is named, and the newest intact one is found."""

import asyncio

from megatron_dapo.actor.checkpoint.checkpoint_files import MANIFEST_FILE, check_there, check_whole, read_manifest
from megatron_dapo.actor.step_data import CheckpointDamagedError
from megatron_dapo.coordinator.progress import Progress, load_progress
from megatron_dapo.storage.group_files import GroupFileError
from megatron_dapo.storage.run_dir import Checkpoint, CheckpointDamaged, RunDir


async def load_counters(run_dir: RunDir, checkpoint: Checkpoint) -> Progress:
    """What the coordinator keeps in a checkpoint; and the trainer's files are there, as far as a look can tell.

    Raises:
        CheckpointDamaged: a file is missing or damaged.
    """
    try:
        check_there(checkpoint.folder / "actor", read_manifest(checkpoint.folder / "actor" / MANIFEST_FILE))
        return load_progress(checkpoint.folder)
    except (CheckpointDamagedError, GroupFileError) as error:
        raise await damaged(run_dir, checkpoint, str(error)) from None


async def damaged(run_dir: RunDir, checkpoint: Checkpoint, reason: str) -> CheckpointDamaged:
    """The error to raise over `checkpoint`. Reads earlier ones whole, the newest first, until one is intact."""
    return CheckpointDamaged(reason, await asyncio.to_thread(_newest_intact, run_dir, checkpoint.step))


def _newest_intact(run_dir: RunDir, before: int) -> int | None:
    earlier = [checkpoint for checkpoint in run_dir.checkpoints() if checkpoint.step < before]
    return next((checkpoint.step for checkpoint in reversed(earlier) if _intact(checkpoint)), None)


def _intact(checkpoint: Checkpoint) -> bool:
    try:
        load_progress(checkpoint.folder)
        check_whole(checkpoint.folder / "actor")
    except (CheckpointDamagedError, GroupFileError):
        return False
    return True
