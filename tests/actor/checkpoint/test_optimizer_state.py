"""The distributed optimizer's state in a checkpoint: whole tensors, whatever ranks wrote them, each its own part."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dapo.actor.optimizer import rectangles
from megatron_dapo.config.actor_config import OffloadConfig
from tests.actor.checkpoint.test_checkpoint import loading, saving, size
from tests.actor.checkpoint.test_checkpoint_background import Held, Trained
from tests.actor.mini_batches import Columns, columns
from tests.actor.tiny import save_tiny


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_rectangles_hold_a_range_in_its_order_and_are_few(shape, data):
    """Checked against an array that holds its own flat numbers. Two a dimension suffice, less one."""
    array = np.arange(np.prod(shape)).reshape(shape)
    begin = data.draw(st.integers(0, array.size))
    end = data.draw(st.integers(begin, array.size))
    blocks = list(rectangles(shape, begin, end))
    cut = [
        array[tuple(slice(at, at + length) for at, length in zip(offset, lengths, strict=True))]
        for offset, lengths in blocks
    ]
    assert [block.shape for block in cut] == [lengths for _, lengths in blocks]
    assert [number for block in cut for number in block.flatten()] == list(range(begin, end))
    assert len(blocks) <= max(1, 2 * len(shape) - 1)


def test_the_example_of_the_docstring():
    assert list(rectangles((4, 10), 7, 32)) == [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 2))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=False)


@pytest.fixture(scope="module")
def data(model) -> Columns:
    return columns(model)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, as torch alone reads it."""
    reader = torch_checkpoint.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    torch_checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.fixture(scope="module")
def plain(gloo, model, data, tmp_path_factory) -> dict[str, torch.Tensor]:
    """By the plain optimizer, whose state Megatron shards like the weights."""
    target = tmp_path_factory.mktemp("plain") / "step"
    gloo(1, saving, model, {}, data, {"optimizer": {"distributed": False}}, target)
    return stored(target)


LAYOUTS = [
    pytest.param({}, marks=pytest.mark.slow),
    {"tensor": 2, "data": 2},
    pytest.param({"data": 4}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "context": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_ranks_write_together_is_the_plain_optimizers_state(gloo, layout, plain, model, data, tmp_path):
    """Cuts fall within rows, within fused weights and between the ranks of a padded vocabulary."""
    gloo(size(layout), saving, model, layout, data, {}, tmp_path / "step")
    found = stored(tmp_path / "step")
    moments = [key for key in plain if key.startswith("optimizer.state.exp_avg")]
    assert len(moments) > 20
    for key in moments:
        rows = plain[key].shape[0]  # the vocabulary's padding is behind them
        assert found[key][rows:].abs().sum() == 0
        scale = plain[key].abs().max()
        torch.testing.assert_close(found[key][:rows], plain[key], rtol=1e-3, atol=1e-4 * scale.item())
    for key in (key for key in found if key.startswith("optimizer.state.param.")):
        weight = found[key.removeprefix("optimizer.state.param.")]
        torch.testing.assert_close(found[key], weight, rtol=0, atol=0)


def sizes_written(place, folder, layout, data, options, target):
    """Bytes that this rank plans to write."""
    from unittest import mock

    from megatron_dapo.actor.checkpoint.shard_writer import ShardWriter

    trained, sizes, write = Trained(place, folder, layout, data, options), [], ShardWriter.write

    def counted(writer: ShardWriter) -> None:
        sizes.append(sum(value.nbytes for value in writer._data.values() if isinstance(value, torch.Tensor)))
        write(writer)

    with mock.patch.object(ShardWriter, "write", counted):
        trained.actor.save_checkpoint(target)
    return sizes


def test_each_data_parallel_rank_writes_its_own_part(gloo, model, data, tmp_path):
    """Of three float32 tensors of each weight, besides the weights, which the first writes."""
    (alone,) = gloo(1, sizes_written, model, {}, data, {}, tmp_path / "1")[0]
    by_rank = [sum(sizes) for sizes in gloo(4, sizes_written, model, {"data": 4}, data, {}, tmp_path / "4")]
    assert sum(by_rank) == alone
    assert by_rank[1:] == pytest.approx([alone * 3 / 4 / 4] * 3, rel=0.05)
    assert by_rank[0] == pytest.approx(alone * (1 / 4 + 3 / 4 / 4), rel=0.05)


@pytest.mark.parametrize("read", [{"data": 3}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)], ids=str)
def test_low_precision_weights_go_on_from_their_master_weights(gloo, read, model, data, tmp_path):
    """At another number of ranks, whose parts begin elsewhere. Rounding of bfloat16 differs between layouts."""
    options = {"dtype": "bfloat16"}
    without_break = gloo(2, saving, model, {"data": 2}, data, options, tmp_path / "step")[0]
    resumed = gloo(size(read), loading, model, read, data, options, tmp_path / "step")[0]
    np.testing.assert_allclose(resumed, without_break[2:], rtol=0.03)


def addresses_around_a_load(place, folder, layout, data, options, source):
    """Where weights, moments and master weights lie, before and after."""
    trained = Trained(place, folder, layout, data, options)
    trained.update()
    actor = trained.actor
    actor.save_checkpoint(source)
    before = actor.memory.storages()
    actor.load_checkpoint(source)
    return before, actor.memory.storages()


@pytest.mark.parametrize(
    "offload",
    [
        pytest.param(OffloadConfig(), id="stays", marks=pytest.mark.slow),
        pytest.param(OffloadConfig(between_phases="all"), id="offloaded"),
    ],
)
def test_a_load_fills_the_optimizer_where_it_lies(gloo, offload, model, data, tmp_path):
    """A second copy of 49 GB would not fit beside the first."""
    options = {"dtype": "bfloat16", "actor": {"offload": offload}}
    for before, after in gloo(2, addresses_around_a_load, model, {"data": 2}, data, options, tmp_path / "step"):
        assert before == after
        assert len(before) > 20


def saving_early(place, folder, layout, data, options, target):
    """A checkpoint before the first step, written when two more are done."""
    trained = Trained(place, folder, layout, data, options)
    with Held() as held:
        assert trained.actor.begin_checkpoint(target)
        trained.update()
        held.let_go()
        trained.actor.finish_checkpoint()


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_first_steps_moments_are_not_in_a_checkpoint_before_it(gloo, distributed, model, data, tmp_path):
    gloo(1, saving_early, model, {}, data, {"optimizer": {"distributed": distributed}}, tmp_path / "step")
    found = stored(tmp_path / "step")
    moments = [value for key, value in found.items() if key.startswith("optimizer.state.exp_avg")]
    assert len(moments) > 20
    assert all(value.abs().sum() == 0 for value in moments)
