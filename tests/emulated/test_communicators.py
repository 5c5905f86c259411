"""`actor.offload.communicators`: a rank's NCCL communicators suspended between phases, over strict groups and a
libnccl.so.2 of the test's own."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dapo.actor.device.communicators import Communicators
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config.actor_config import OffloadConfig
from tests.actor.mini_batches import TEMPERATURE, Columns, actor_config, columns, mini_batch, start_actor
from tests.actor.tiny import save_tiny
from tests.emulated import strict_library
from tests.emulated.strict_board import StrictError
from tests.emulated.strict_library import BYTES, library
from tests.emulated.strict_ranks import Broken, full, join
from tests.emulated.test_strict_actor import NONE_OF, OPTIMIZER, chosen_as_on_cuda
from tools.rank_pool import RankPlace

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has loaded a libnccl.so.2"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc"),
]


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    return strict_library.compiled(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=True)


def two_phases(place: RankPlace, native: Path, folder: Path, layout: dict, data: Columns, out: Path, suspends: bool):
    """Two updates with the servers' turn between them, in which a checkpoint is written to its end; what the updates
    report, how many communicators the turn found, and the bytes that it was told of."""
    library.load(native)
    offload = OffloadConfig(between_phases="all", communicators=suspends)
    config = actor_config(layout, optimizer=OPTIMIZER | {"distributed": True}, offload=offload)
    with chosen_as_on_cuda():
        actor = start_actor(place, folder, config)
    batch, given = mini_batch(data, config, without=NONE_OF), 0
    found: list[tuple[float, float]] = []

    def update() -> None:
        reports = actor.update([batch], PolicyObjective(), TEMPERATURE)
        found.extend((report.loss, report.grad_norm) for report in reports)

    update()
    used = [group for group in dist.distributed_c10d._world.pg_map if group._comm_ptr()]
    actor.begin_checkpoint(out)
    if suspends:
        given = actor.communicators.suspend()
        assert [library.is_suspended(group) for group in used] == [group is not dist.group.WORLD for group in used]
    while not actor.finish_checkpoint(wait=False):
        pass
    if suspends:
        with pytest.raises(StrictError, match="on a suspended communicator"):
            dist.all_reduce(full(1, 2, backend="nccl"), group=used[-1])
        actor.communicators.resume()
        assert not any(map(library.is_suspended, used))
    update()
    actor.close()
    return found, len(used), given


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"data": 2}, id="data"),
        pytest.param({"tensor": 2, "data": 2}, id="tensor and data", marks=pytest.mark.slow),
    ],
)
def test_an_update_after_the_servers_turn_is_the_same(strict, native, model, layout, tmp_path):
    ranks, data = 2 * layout.get("tensor", 1), columns(model)
    plain = strict(ranks, two_phases, native, model, layout, data, tmp_path / "plain", False)
    turns = strict(ranks, two_phases, native, model, layout, data, tmp_path / "turns", True)
    assert not any(isinstance(result, Broken) for result in (*plain, *turns)), (plain, turns)
    for (wanted, *_), (found, used, given) in zip(plain, turns, strict=True):
        assert found == wanted
        assert used > 2, "some are made by an update"
        assert given == (used - 1) * BYTES
    assert (tmp_path / "turns").is_dir()


def with_group(place: RankPlace, native: Path, version: int, steps: tuple[tuple[str, ...], ...]) -> list[Any]:
    """What comes of `steps`, one tuple a rank, with a group that was used and one that was not; an error's text."""
    library.load(native, version=version)
    join(place, "nccl")
    used, unused = dist.new_group(), dist.new_group()
    dist.all_reduce(full(1, 2, backend="nccl"), group=used)
    assert unused._comm_ptr() == 0  # type: ignore[attr-defined]
    found: list[Any] = []
    try:
        communicators = Communicators(used=True)
        for step in steps[place.rank]:
            if step == "somebody else suspends":
                communicators = Communicators(used=True)
            else:
                found.append(getattr(communicators, step)())
    except (ValueError, RuntimeError) as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_group_that_was_not_used_is_left_alone_and_a_second_turn_is_like_the_first(strict, native):
    steps = ("resume", *("suspend", "resume") * 2, "suspend", "suspend")
    wanted = [None, BYTES, None, BYTES, None, BYTES, BYTES]
    assert strict(2, with_group, native, 22907, (steps, steps)) == [wanted] * 2


def test_nccls_errors_are_told_in_its_words(strict, native):
    found = strict(2, with_group, native, 23007, (("suspend", "somebody else suspends", "suspend"),) * 2)
    assert found == [[BYTES, "RuntimeError: ncclCommSuspend: NCCL error 5: MemManager: Already suspended"]] * 2


def test_every_rank_has_to_come(strict, native):
    first, second = strict(2, with_group, native, 22907, (("suspend",), ()), patience_s=2)
    assert first == ["RuntimeError: ncclCommSuspend: NCCL error 6: ranks did not come"]
    assert second == []


def test_an_older_nccl_is_refused_by_its_version(strict, native):
    ((found,),) = strict(1, with_group, native, 22809, (("suspend",),))
    assert found == "ValueError: actor.offload.communicators: needs NCCL 22907 (2.29.7); torch has loaded 22809"


def test_a_torch_without_nccl_is_refused():
    with pytest.raises(ValueError, match=r"offload\.communicators: needs NCCL 22907 .* has loaded none"):
        Communicators(used=True)
    Communicators(used=False).resume()
