"""Copies from the emulated device to memory that is not pinned, through a buffer that is."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.actor.mini_batches import actor_config, start_actor
from tests.actor.tiny import save_tiny
from tests.emulated.strict_ranks import GPU
from tests.emulated.test_strict_actor import chosen_as_on_cuda
from tools.rank_pool import RankPlace

TENSORS = {
    "several pieces and a rest": torch.arange(100, dtype=torch.float32),
    "not contiguous": torch.arange(21, dtype=torch.bfloat16).view(3, 7).t(),
    "inside of a storage": torch.arange(90, dtype=torch.int16)[7:50],
    "one number": torch.tensor(3, dtype=torch.int64),
    "nothing": torch.empty(0, 4),
    "bytes": torch.arange(64, dtype=torch.uint8) > 20,
}


def copied(place: RankPlace, pieces_of: int) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """The copies, those that are pinned or elsewhere than on the host, and how many pinned buffers they took. The
    emulated device refuses that the buffer is read, or filled again, before a copy to it has ended."""
    from megatron_dapo.actor import offload
    from tests.emulated import strict_stream

    pinned = strict_stream.device.pinned
    before = len(pinned._kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "STAGING_BYTES", pieces_of)
        offload._staging.cache_clear()
        results = {name: offload.to_pageable(tensor.to(GPU)) for name, tensor in TENSORS.items()}
    offload._staging.cache_clear()
    wrong = [name for name, result in results.items() if result in pinned or result.is_cuda]
    return results, wrong, len(pinned._kept) - before


def test_the_bytes_are_equal_and_one_buffer_serves_all(strict):
    ((results, wrong, buffers),) = strict(1, copied, 64)
    assert wrong == []
    assert buffers == 1
    for name, tensor in TENSORS.items():
        assert results[name].dtype == tensor.dtype, name
        assert torch.equal(results[name], tensor), name
        assert results[name].is_contiguous(), name


def test_what_is_on_the_host_stays_where_it_is():
    from megatron_dapo.actor.offload import to_pageable

    tensor = torch.arange(3.0, requires_grad=True)
    assert to_pageable(tensor).data_ptr() == tensor.data_ptr()


def staged(place: RankPlace, folder: Path, out: Path) -> tuple[int, list[int]]:
    """How many tensors the model has, and pieces that went through the buffer: in a checkpoint that is written at once,
    one that is written beside training, and an export."""
    from megatron_dapo.actor import offload

    def so_far() -> int:
        return offload._staging.cache_info().hits

    with chosen_as_on_cuda():
        actor = start_actor(place, folder, actor_config({}), dtype="bfloat16")
        counts = [so_far()]
        actor.save_checkpoint(out / "at once")
        counts.append(so_far())
        assert actor.begin_checkpoint(out / "beside")
        counts.append(so_far())
        actor.finish_checkpoint()
        assert so_far() == counts[-1], "the writer's thread copies nothing from the device"
        actor.export_hf(out / "export")
        counts.append(so_far())
        parameters = sum(len(list(chunk.parameters())) for chunk in actor.optimizer.chunks)
        actor.close()
    return parameters, [later - earlier for earlier, later in pairwise(counts)]


def test_checkpoints_and_the_export_go_through_it(strict, tmp_path):
    folder = save_tiny(tmp_path / "model", "qwen2", tied=True)
    ((parameters, (at_once, beside, export)),) = strict(1, staged, folder, tmp_path)
    assert beside in (at_once, at_once + 1)  # the very first one makes the buffer
    assert at_once >= 4 * parameters - 1, "weight, master weight and two moments of each"
    assert export >= parameters
