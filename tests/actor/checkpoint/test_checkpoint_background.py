"""Checkpoints written while training goes on: what they hold, what a writer that fails leaves, how much is copied."""

import json
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_dapo.actor.step_data import CheckpointError
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import OffloadConfig
from tests.actor.checkpoint.test_checkpoint import NONE_OF, OPTIMIZER, loading, size
from tests.actor.gloo import RankError, RankPlace
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


class Trained:
    """An actor of one rank, and updates of it."""

    def __init__(self, place: RankPlace, folder: Path, layout: dict, data: Columns, options: dict) -> None:
        optimizer = OPTIMIZER | options.get("optimizer", {})
        config = actor_config(layout, optimizer=optimizer, **options.get("actor", {}))
        self.actor = start_actor(place, folder, config, dtype=options.get("dtype", "float32"))
        self._batch = mini_batch(data, config, without=NONE_OF)

    def update(self, steps: int = 2) -> list[tuple]:
        reports = self.actor.update([self._batch] * steps, PolicyObjective(), TEMPERATURE)
        return [(report.optimizer_step, report.loss, report.grad_norm, report.lr) for report in reports]


class Held:
    """The writers of this process wait until they are let go."""

    def __enter__(self) -> "Held":
        from megatron_dapo.actor.checkpoint.shard_writer import ShardWriter

        self._gate, write = threading.Event(), ShardWriter.write

        def held(writer: ShardWriter) -> None:
            assert self._gate.wait(60)
            write(writer)

        self._patch = mock.patch.object(ShardWriter, "write", held)
        self._patch.start()
        return self

    def let_go(self) -> None:
        self._gate.set()

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()


def saving_beside(place, folder, layout, data, options, target):
    """Two steps, a checkpoint that is written only after two more: those two steps."""
    trained = Trained(place, folder, layout, data, options)
    trained.update()
    with Held() as held:
        assert trained.actor.begin_checkpoint(target)
        after = trained.update()
        assert not trained.actor.finish_checkpoint(wait=False)
        assert not target.exists()
        held.let_go()
        assert trained.actor.finish_checkpoint()
    assert trained.actor.finish_checkpoint(wait=False)
    return after


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param({}, {}, marks=pytest.mark.slow),
        pytest.param({}, {"optimizer": {"distributed": False}}, marks=pytest.mark.slow),
        ({"data": 2}, {"dtype": "bfloat16"}),
        pytest.param({"tensor": 2}, {"optimizer": {"distributed": False}, "dtype": "bfloat16"}, marks=pytest.mark.slow),
        ({"pipeline": 2, "virtual_pipeline": 2}, {}),
        ({"data": 2}, {"actor": {"offload": OffloadConfig(between_phases="all")}}),
    ],
    ids=str,
)
def test_what_training_changes_meanwhile_is_not_in_it(gloo, layout, options, model, data, tmp_path):
    after = gloo(size(layout), saving_beside, model, layout, data, options, tmp_path / "step")[0]
    resumed = gloo(size(layout), loading, model, layout, data, options, tmp_path / "step")[0]
    assert resumed == after
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def saving_two(place, folder, layout, data, target):
    """One checkpoint is begun while another is under way."""
    trained = Trained(place, folder, layout, data, {})
    trained.actor.begin_checkpoint(target / "first")
    trained.update()
    trained.actor.begin_checkpoint(target / "second")
    first = (target / "first").is_dir()
    trained.actor.finish_checkpoint()
    return first and (target / "second").is_dir()


def test_one_copy_at_a_time(gloo, model, data, tmp_path):
    assert gloo(2, saving_two, model, {"data": 2}, data, tmp_path) == [True, True]


def failing(place: RankPlace, folder: Path, layout: dict, data: Columns, target: Path) -> tuple[str, list, list]:
    """On rank 1 no file may grow beyond 20 kB while the second of three checkpoints is written."""
    trained = Trained(place, folder, layout, data, {})
    trained.update()
    trained.actor.begin_checkpoint(target / "1")
    trained.actor.finish_checkpoint()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if place.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        trained.actor.begin_checkpoint(target / "2")
        trained.update()
        with pytest.raises(CheckpointError) as caught:
            trained.actor.finish_checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(path.name for path in target.iterdir())
    torch.distributed.barrier()
    trained.actor.begin_checkpoint(target / "3")
    trained.actor.finish_checkpoint()
    return str(caught.value), left, sorted(path.name for path in target.iterdir())


def test_a_writer_that_fails_is_named_on_every_rank_and_leaves_nothing(gloo, model, data, tmp_path):
    for message, left, later in gloo(2, failing, model, {"tensor": 2}, data, tmp_path):
        assert message.startswith(f"{tmp_path / '2'}: the checkpoint could not be written: rank 1: ")
        assert "File too large" in message
        assert left == ["1"]
        assert later == ["1", "3"]


def beginning_without_room(place: RankPlace, folder: Path, data: Columns, target: Path) -> str:
    """Rank 0's disk has no room even for what Megatron writes there while the other ranks wait."""
    trained = Trained(place, folder, {"tensor": 2}, data, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if place.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            trained.actor.begin_checkpoint(target / "1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(caught.value)


def test_a_disk_that_is_full_when_one_begins_is_named_on_every_rank(gloo, model, data, tmp_path):
    for message in gloo(2, beginning_without_room, model, data, tmp_path):
        assert message.startswith(f"{tmp_path / '1'}: the checkpoint could not be written: ")
        assert "File too large" in message


def dying(place: RankPlace, folder: Path, data: Columns, target: Path) -> None:
    """A whole checkpoint, then a process that ends while it writes the next one."""
    trained = Trained(place, folder, {}, data, {})
    trained.update()
    trained.actor.save_checkpoint(target / "1")
    (target / "after.json").write_text(json.dumps(trained.update()))
    with mock.patch("megatron_dapo.actor.checkpoint.shard_writer.digest_of", side_effect=lambda _: os._exit(9)):
        trained.actor.begin_checkpoint(target / "2")
        time.sleep(60)


def test_a_kill_while_one_is_written_leaves_the_one_before(gloo, model, data, tmp_path):
    with pytest.raises(RankError, match="rank 0 died, exit code 9"):
        gloo(1, dying, model, data, tmp_path)
    assert (tmp_path / "2.partial" / "__0_0.distcp").is_file()
    assert not (tmp_path / "2").exists()
    resumed = gloo(1, loading, model, {}, data, {}, tmp_path / "1")[0]
    assert [list(step) for step in resumed] == json.loads((tmp_path / "after.json").read_text())


def copying(place, folder, layout, data, options, target, available):
    """(whether it was written beside, bytes that were copied)."""
    from megatron_dapo.actor.checkpoint.shard_writer import ShardWriter

    trained = Trained(place, folder, layout, data, options)
    copied, copy = [], ShardWriter.copy

    def counted(writer: ShardWriter) -> None:
        copied.append(writer.bytes_to_copy)
        copy(writer)
        assert writer.bytes_to_copy == 0

    room = mock.patch("megatron_dapo.actor.checkpoint.checkpoint.available_bytes", return_value=available)
    with mock.patch.object(ShardWriter, "copy", counted), room:
        beside = trained.actor.begin_checkpoint(target)
        trained.actor.finish_checkpoint()
    return beside, copied


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_copy_is_bounded_by_what_the_rank_writes(gloo, distributed, model, data, tmp_path):
    """With either optimizer: nothing is gathered from other ranks."""
    target, options = tmp_path / "step", {"optimizer": {"distributed": distributed}}
    [(beside, (copied,))] = gloo(1, copying, model, {}, data, options, target, 2**34)
    written = sum(file.stat().st_size for file in target.glob("*.distcp"))
    assert beside
    assert 0 < copied <= written


def test_a_host_without_room_for_the_copies_writes_at_once(gloo, model, data, tmp_path):
    """Twice what all ranks of the host copy must be free: some of what is free now is needed a moment later."""
    options: dict = {"optimizer": {"distributed": False}}
    found = gloo(2, copying, model, {"tensor": 2}, data, options, tmp_path / "1", 2**34)
    needed = sum(copied for _, (copied,) in found)
    short = gloo(2, copying, model, {"tensor": 2}, data, options, tmp_path / "2", 2 * needed - 1)
    enough = gloo(2, copying, model, {"tensor": 2}, data, options, tmp_path / "3", 2 * needed)
    assert [beside for beside, _ in short] == [False, False]
    assert [copied for _, copied in short] == [[], []]
    assert [beside for beside, _ in enough] == [True, True]
    assert (tmp_path / "2" / "manifest.json").is_file()
