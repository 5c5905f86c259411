"""Checkpoints: a resume goes on bit for bit, at another layout to rounding, and never from a damaged file."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dapo.actor.step_data import CheckpointError
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from tests.actor.gloo import RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.tiny import save_tiny

NONE_OF = ("reference_log_probs", "correction")
OPTIMIZER = {"lr": 5e-3, "warmup_rollout_steps": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


def size(layout: dict[str, Any]) -> int:
    return int(np.prod([layout.get(name, 1) for name in ("tensor", "pipeline", "context", "data")]))


def train(
    place: RankPlace,
    folder: Path,
    layout: dict[str, Any],
    data: Columns,
    options: dict[str, Any],
    *,
    load: Path | None = None,
    save: Path | None = None,
    steps: int = 2,
):
    """[load,] two steps, [save,] two more: (step, loss, norm, rate) of each."""
    config = actor_config(layout, optimizer=OPTIMIZER | options.get("optimizer", {}), **options.get("actor", {}))
    actor = start_actor(place, folder, config, dtype=options.get("dtype", "float32"))
    batch = mini_batch(data, config, without=NONE_OF)
    if load is not None:
        actor.load_checkpoint(load)
    reports = [] if load is not None else actor.update([batch] * 2, PolicyObjective(), TEMPERATURE)
    if save is not None:
        actor.save_checkpoint(save)
    reports += actor.update([batch] * steps, PolicyObjective(), TEMPERATURE)
    return [(report.optimizer_step, report.loss, report.grad_norm, report.lr) for report in reports]


def saving(place, folder, layout, data, options, target):
    return train(place, folder, layout, data, options, save=target)


def loading(place, folder, layout, data, options, source):
    return train(place, folder, layout, data, options, load=source)


@pytest.mark.parametrize(
    ("layout", "options"), [({}, {}), pytest.param({"data": 2}, {"dtype": "bfloat16"}, marks=pytest.mark.slow)], ids=str
)
def test_a_resume_is_bit_equal(gloo, layout, options, model, data, tmp_path):
    """test_checkpoint_background.py has more layouts: there training changes meanwhile what is written."""
    without_break = gloo(size(layout), saving, model, layout, data, options, tmp_path / "step")[0]
    resumed = gloo(size(layout), loading, model, layout, data, options, tmp_path / "step")[0]
    assert resumed == without_break[2:]
    assert resumed[0][0] == 3


@pytest.mark.parametrize(
    ("written", "read", "options"),
    [
        pytest.param({"tensor": 2}, {}, {}, marks=pytest.mark.slow),
        ({}, {"tensor": 2, "sequence_parallel": True}, {}),
        ({"pipeline": 2, "virtual_pipeline": 2}, {"data": 2}, {}),
        pytest.param({"context": 2}, {"tensor": 2}, {"optimizer": {"distributed": False}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_loads_at_another_layout(gloo, written, read, options, model, data, tmp_path):
    without_break = gloo(size(written), saving, model, written, data, options, tmp_path / "step")[0]
    resumed = gloo(size(read), loading, model, read, data, options, tmp_path / "step")[0]
    np.testing.assert_allclose(resumed, without_break[2:], rtol=1e-4)


@pytest.mark.slow
def test_a_checkpoint_loads_with_and_without_the_fused_output_layer(gloo, model, data, tmp_path):
    fused = {"actor": {"fused_linear_log_prob": True}}
    without_break = gloo(2, saving, model, {"pipeline": 2}, data, fused, tmp_path / "fused")[0]
    plain = gloo(2, loading, model, {"tensor": 2}, data, {}, tmp_path / "fused")[0]
    np.testing.assert_allclose(plain, without_break[2:], rtol=1e-4)
    gloo(2, saving, model, {"pipeline": 2}, data, {}, tmp_path / "plain")
    resumed = gloo(2, loading, model, {"tensor": 2}, data, fused, tmp_path / "plain")[0]
    np.testing.assert_allclose(resumed, without_break[2:], rtol=1e-4)


def saving_at_once(place, folder, layout, data, options, target):
    """A checkpoint before the first step, then two steps."""
    config = actor_config(layout, optimizer=OPTIMIZER | options)
    actor = start_actor(place, folder, config)
    actor.save_checkpoint(target)
    reports = actor.update([mini_batch(data, config, without=NONE_OF)] * 2, PolicyObjective(), TEMPERATURE)
    return [(report.optimizer_step, report.loss, report.grad_norm, report.lr) for report in reports]


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_checkpoint_before_the_first_step(gloo, distributed, model, data, tmp_path):
    options = {"distributed": distributed}
    without_break = gloo(1, saving_at_once, model, {}, data, options, tmp_path / "step")[0]
    resumed = gloo(1, loading, model, {}, data, {"optimizer": options}, tmp_path / "step")[0]
    assert resumed == without_break


def test_the_config_wins_over_the_checkpoint(gloo, model, data, tmp_path):
    gloo(1, saving, model, {}, data, {}, tmp_path / "step")
    resumed = gloo(1, loading, model, {}, data, {"optimizer": {"lr": 1e-4}}, tmp_path / "step")[0]
    assert [rate for _, _, _, rate in resumed] == pytest.approx([0.75e-4, 1e-4])


def error_of(place: RankPlace, folder: Path, layout: dict[str, Any], data: Columns, options: dict, source: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        loading(place, folder, layout, data, options, source)
    return str(caught.value)


@pytest.fixture(scope="module")
def saved(gloo, model, data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step"
    gloo(2, saving, model, {"tensor": 2}, data, {}, folder)
    return folder


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_one_byte_is_found_in_any_file(gloo, saved, model, data, tmp_path):
    """Changed in each; missing in the first one too."""
    for number, name in enumerate(sorted(json.loads((saved / "manifest.json").read_text())["files"])):
        broken = copy_of(saved, tmp_path / str(number))
        content = (broken / name).read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 1
        for damaged in (changed, content[:-1])[: 1 if number else 2]:
            (broken / name).write_bytes(damaged)
            for message in gloo(2, error_of, model, {"tensor": 2}, data, {}, broken):
                assert message.startswith(f"{broken / name} is damaged")


def test_a_damaged_manifest_is_named(gloo, saved, model, data, tmp_path):
    broken = copy_of(saved, tmp_path / "broken")
    (broken / "manifest.json").write_text((saved / "manifest.json").read_text()[:-5])
    assert gloo(1, error_of, model, {}, data, {}, broken)[0].startswith(f"{broken / 'manifest.json'} is damaged")


def saving_error(place: RankPlace, folder: Path, layout: dict[str, Any], target: Path) -> str:
    actor = start_actor(place, folder, actor_config(layout), timeout_s=20)
    with pytest.raises(CheckpointError) as caught:
        actor.save_checkpoint(target)
    return str(caught.value)


def test_no_rank_is_left_waiting_when_a_save_fails(gloo, model, tmp_path):
    """Rank 0 cannot make the folder: every rank hears of it and none times out."""
    (tmp_path / "file").write_text("in the way")
    for message in gloo(2, saving_error, model, {"data": 2}, tmp_path / "file" / "step"):
        assert message.startswith(f"{tmp_path / 'file' / 'step'}: the checkpoint could not be written")


def test_a_missing_file_is_named(gloo, saved, model, data, tmp_path):
    broken = copy_of(saved, tmp_path / "broken")
    victim = next(broken.glob("*.distcp"))
    victim.unlink()
    assert gloo(1, error_of, model, {}, data, {}, broken)[0].startswith(f"{victim} is missing")


def test_a_folder_that_is_no_checkpoint_is_named(gloo, model, data, tmp_path):
    message = gloo(1, error_of, model, {}, data, {}, tmp_path / "nothing")[0]
    assert message.startswith(f"{tmp_path / 'nothing' / 'manifest.json'} is damaged: FileNotFoundError")


def test_the_other_kind_of_optimizer_is_refused(gloo, saved, model, data):
    message = gloo(1, error_of, model, {}, data, {"optimizer": {"distributed": False}}, saved)[0]
    assert "set actor.optimizer.distributed=true, as it was written with" in message


def test_saving_again_replaces_and_leaves_nothing_behind(gloo, model, data, tmp_path):
    (tmp_path / "step.partial").mkdir()
    (tmp_path / "step.partial" / "half").write_text("of a save that was killed")
    for _ in range(2):
        gloo(1, saving, model, {}, data, {}, tmp_path / "step")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert "half" not in [path.name for path in (tmp_path / "step").iterdir()]


def unsynced(place: RankPlace, folder: Path, data: Columns, target: Path) -> set[str]:
    """Files and folders of a checkpoint that were not asked to be on disk."""
    synced, fsync = set(), os.fsync

    def seen(file) -> None:
        synced.add(os.fstat(file).st_ino)
        fsync(file)

    os.fsync = seen
    try:
        train(place, folder, {}, data, {}, save=target, steps=0)
    finally:
        os.fsync = fsync
    return {path.name for path in (target.parent, target, *target.iterdir()) if path.stat().st_ino not in synced}


def test_a_power_cut_takes_nothing_of_a_whole_checkpoint(gloo, model, data, tmp_path):
    """Megatron writes `common.pt` and `metadata.json` without waiting for the disk."""
    assert gloo(1, unsynced, model, data, tmp_path / "step") == [set()]
