"""Saved batches: whole or not at all, and the newest ones only."""

import os

import numpy as np
import pytest

from megatron_dapo.diagnostics.step_replay import load_batch
from megatron_dapo.storage.group_files import batch_folder, save_batch
from megatron_dapo.storage.run_dir import RunDir
from tests.coordinator.test_sampler import group

ADVANTAGES = np.array([0.5, -0.25], np.float32)


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(tmp_path, resume=False)
    yield run_dir
    run_dir.close()


def positions(run_dir, step: int) -> list[int]:
    groups, advantages = load_batch(run_dir.path, step)
    assert np.array_equal(advantages, ADVANTAGES)
    return [group.position for group in groups]


def test_a_kill_while_a_step_is_saved_again_leaves_its_first_batch_whole(run_dir, monkeypatch):
    save_batch(run_dir, 1, [group(3, 1, 5)], ADVANTAGES)
    with monkeypatch.context() as killed:
        # Both files are written, and one of them is on disk.
        calls = iter([None])

        def fsync(_):
            next(calls)

        killed.setattr(os, "fsync", fsync)
        with pytest.raises(StopIteration):
            save_batch(run_dir, 1, [group(4, 1, 5)], ADVANTAGES)
    assert positions(run_dir, 1) == [3]
    save_batch(run_dir, 1, [group(5, 1, 5)], ADVANTAGES)
    assert positions(run_dir, 1) == [5]
    assert [folder.name for folder in batch_folder(run_dir.path, 1).parent.iterdir()] == ["step_1"]


def test_the_batches_that_stay_are_those_whose_beginning_is_there(run_dir):
    for step in (1, 2, 3):
        save_batch(run_dir, step, [group(step, 1, 5)], ADVANTAGES)
    run_dir.publish_checkpoint(run_dir.checkpoint_aside(2), 2, keep=1)
    save_batch(run_dir, 4, [group(4, 1, 5)], ADVANTAGES)
    assert [folder.name for folder in sorted((run_dir.path / "batches").iterdir())] == ["step_1", "step_3", "step_4"]
