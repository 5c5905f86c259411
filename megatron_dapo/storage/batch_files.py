"""Batches on disk: what `megatron-dapo replay` needs to compute a step again."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_dapo.experience.groups import ScoredGroup
from megatron_dapo.storage.durable import put_in_place, sync_folder
from megatron_dapo.storage.group_files import GroupFileError, load_groups, save_groups
from megatron_dapo.storage.run_dir import RunDir

FOLDER = "batches"


def save_batch(run_dir: RunDir, step: int, groups: Sequence[ScoredGroup], advantages: np.ndarray) -> None:
    """Keep the groups that rollout step `step` trains on, and drop batches from before the oldest checkpoint. Step 1's
    stays: it starts from the model that the run was begun with.

    Whole or not at all: a resumed run writes a step anew while the batch of its first time is still there.

    Args:
        advantages: float32 [R], as the step uses them.
    """
    folder = batch_folder(run_dir.path, step)
    for left in folder.parent.glob(".step_*"):  # of a save that was killed
        shutil.rmtree(left)
    aside = folder.with_name(f".{folder.name}.tmp")
    aside.mkdir(parents=True)
    save_groups(aside, "batch", groups, {"advantages": advantages.tolist()})
    sync_folder(aside)
    put_in_place(aside, folder)
    sync_folder(folder.parent)
    kept = run_dir.checkpoints()
    for old in folder.parent.glob("step_*"):
        if kept and 1 < int(old.name.removeprefix("step_")) <= kept[0].step:
            shutil.rmtree(old)


def load_batch(run_path: Path, step: int) -> tuple[tuple[ScoredGroup, ...], np.ndarray]:
    """Groups and advantages of `save_batch`.

    Raises:
        GroupFileError: there is none, or it is damaged.
    """
    folder = batch_folder(run_path, step)
    if not folder.is_dir():
        there = sorted(int(found.name.removeprefix("step_")) for found in folder.parent.glob("step_*"))
        raise GroupFileError(
            f"{folder} is not there; kept are the batches of steps {', '.join(map(str, there)) or '(none)'}; a run "
            "keeps them with run.save_batches=true"
        )
    groups, extra = load_groups(folder, "batch")
    return groups, np.array(extra["advantages"], np.float32)


def batch_folder(run_path: Path, step: int) -> Path:
    """Of rollout step `step`."""
    return run_path / FOLDER / f"step_{step}"
