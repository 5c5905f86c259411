"""The coordinator's part of a checkpoint: counters, pass rate and the carried groups; read back, or found damaged.

A checkpoint that a run would go on from and that has a damaged file is named, and the newest intact one before it is
found.
"""

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dapo.actor.checkpoint.checkpoint_files import MANIFEST_FILE, check_there, check_whole, read_manifest
from megatron_dapo.actor.step_data import CheckpointDamagedError
from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.coordinator.sampler import SamplerState
from megatron_dapo.storage.group_files import GroupFileError, load_groups, save_groups
from megatron_dapo.storage.run_dir import Checkpoint, CheckpointDamaged, RunDir


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where the run stands after `rollout_step` steps."""

    rollout_step: int
    optimizer_step: int
    weight_version: int
    sampler: SamplerState


def save_progress(progress: Progress, folder: Path) -> None:
    """Write `progress.json` and `progress.npz` into `folder`."""
    extra = {
        "rollout_step": progress.rollout_step,
        "optimizer_step": progress.optimizer_step,
        "weight_version": progress.weight_version,
        "cursor": progress.sampler.cursor,
        "pass_rate": asdict(progress.sampler.pass_rate),
    }
    save_groups(folder, "progress", progress.sampler.carried, extra)


def load_progress(folder: Path) -> Progress:
    """Read back what `save_progress` wrote, equal in every bit.

    Raises:
        GroupFileError: a file is missing or damaged.
    """
    carried, extra = load_groups(folder, "progress")
    try:
        return Progress(
            rollout_step=extra["rollout_step"],
            optimizer_step=extra["optimizer_step"],
            weight_version=extra["weight_version"],
            sampler=SamplerState(cursor=extra["cursor"], pass_rate=PassRate(**extra["pass_rate"]), carried=carried),
        )
    except (KeyError, TypeError) as error:
        raise GroupFileError(f"{folder / 'progress.json'}: written by another version ({error})") from None


async def load_counters(run_dir: RunDir, checkpoint: Checkpoint) -> Progress:
    """What the coordinator keeps in a checkpoint; and the trainer's files are there, as far as a look can tell.

    Raises:
        CheckpointDamaged: a file is missing or damaged.
    """
    try:
        check_there(checkpoint.folder / "actor", read_manifest(checkpoint.folder / "actor" / MANIFEST_FILE))
        return load_progress(checkpoint.folder)
    except (CheckpointDamagedError, GroupFileError) as error:
        raise await damaged_checkpoint(run_dir, checkpoint, str(error)) from None


async def damaged_checkpoint(run_dir: RunDir, checkpoint: Checkpoint, reason: str) -> CheckpointDamaged:
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
