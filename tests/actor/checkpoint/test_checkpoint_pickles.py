"""A checkpoint of a stranger's runs nothing of its own, whatever of it is pickled."""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from megatron_dapo.actor.checkpoint.checkpoint_pickles import INDEX_FILE, read_index, refuse_foreign_code
from megatron_dapo.actor.step_data import CheckpointError


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def write(folder: Path, note: Any) -> Path:
    """A checkpoint of a tensor and of a value that is none."""
    checkpoint.save({"weight": torch.arange(6.0), "note": note}, checkpoint_id=folder, no_dist=True)
    return folder


def test_what_a_checkpoint_needs_is_let_through(tmp_path):
    folder = write(tmp_path / "step", {"lr": 1e-6, "names": ["a", "b"], "bytes": torch.zeros(3, dtype=torch.uint8)})
    refuse_foreign_code(folder)
    assert set(read_index(folder).state_dict_metadata) == {"weight", "note.lr", "note.names", "note.bytes"}


def test_torch_itself_would_run_what_is_refused(tmp_path):
    """Otherwise the two tests below could not fail."""
    folder = write(tmp_path / "step", Bomb(tmp_path / "ran"))
    checkpoint.load({"note": None}, checkpoint_id=folder, no_dist=True)
    assert (tmp_path / "ran").exists()


def test_code_in_a_value_is_named_and_not_run(tmp_path):
    folder = write(tmp_path / "step", Bomb(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: would call posix\.mkdir .*value note"):
        refuse_foreign_code(folder)
    assert not (tmp_path / "ran").exists()


def test_code_in_the_common_values_is_named_and_nobody_is_told_to_load_it(tmp_path):
    folder = write(tmp_path / "step", "")
    torch.save({"lr": 1e-6}, folder / "common.pt")
    refuse_foreign_code(folder)
    torch.save(Bomb(tmp_path / "ran"), folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt: would call posix\.mkdir") as refused:
        refuse_foreign_code(folder)
    assert "weights_only" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_code_in_the_index_is_named_and_not_run(tmp_path):
    folder = write(tmp_path / "step", "")
    (folder / INDEX_FILE).write_bytes(pickle.dumps([Bomb(tmp_path / "ran")]))
    with pytest.raises(CheckpointError, match=r"\.metadata: would call posix\.mkdir"):
        refuse_foreign_code(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage", pickle.dumps({"a": 1})])
def test_an_index_that_is_none_is_named(tmp_path, content):
    folder = write(tmp_path / "step", "")
    (folder / INDEX_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        refuse_foreign_code(folder)


def test_an_index_that_points_elsewhere_is_refused(tmp_path):
    folder = write(tmp_path / "step", "")
    index = read_index(folder)
    index.storage_data = {
        place: replace(info, relative_path="../other.distcp") for place, info in index.storage_data.items()
    }
    (folder / INDEX_FILE).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"points to '\.\./other\.distcp'"):
        refuse_foreign_code(folder)
