"""The coordinator's part of a checkpoint: equal in every bit, and damage is named."""

import dataclasses

import numpy as np
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.coordinator.progress import Progress, load_progress, save_progress
from megatron_dapo.coordinator.sampler import SamplerState
from megatron_dapo.storage.group_files import GroupFileError
from tests.coordinator.test_sampler import group


@pytest.fixture
def saved(tmp_path):
    carried = (group(7, 2, 5, version=3), group(8, 1, 9, version=3))
    state = SamplerState(cursor=7, pass_rate=PassRate.start(0.3).update(kept=2, filtered=5), carried=carried)
    progress = Progress(rollout_step=3, optimizer_step=12, weight_version=3, sampler=state)
    save_progress(progress, tmp_path)
    return progress, tmp_path


def plain(value):
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tobytes())
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def test_what_was_saved_comes_back_equal(saved):
    progress, folder = saved
    assert plain(load_progress(folder)) == plain(progress)


@pytest.mark.parametrize("name", ["progress.json", "progress.npz"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "zeros"])
def test_a_damaged_file_is_named(saved, name, damage):
    _, folder = saved
    content = (folder / name).read_bytes()
    changed = {"cut": content[: len(content) // 2], "empty": b"", "zeros": bytes(len(content))}
    (folder / name).unlink() if damage == "missing" else (folder / name).write_bytes(changed[damage])
    with pytest.raises(GroupFileError, match=str(folder)):
        load_progress(folder)


def test_a_changed_digit_is_found(saved):
    _, folder = saved
    file = folder / "progress.json"
    file.write_text(file.read_text().replace('"cursor": 7', '"cursor": 9'))
    with pytest.raises(GroupFileError, match="checksum"):
        load_progress(folder)


def test_arrays_of_another_checkpoint_are_refused(saved, tmp_path_factory):
    progress, folder = saved
    other = tmp_path_factory.mktemp("other")
    state = dataclasses.replace(progress.sampler, carried=progress.sampler.carried[:1])
    save_progress(dataclasses.replace(progress, sampler=state), other)
    (folder / "progress.json").write_bytes((other / "progress.json").read_bytes())
    with pytest.raises(GroupFileError, match="checksum"):
        load_progress(folder)


def test_a_flipped_bit_is_found_wherever_it_is(saved):
    """In the arrays' file too, whose own checksums do not cover its directory."""
    _, folder = saved
    for name in ("progress.json", "progress.npz"):
        content = (folder / name).read_bytes()
        for at in range(0, len(content), 37):
            (folder / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(GroupFileError):
                load_progress(folder)
        (folder / name).write_bytes(content)
    load_progress(folder)
