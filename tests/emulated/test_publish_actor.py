"""The actor's own weights by process groups under NCCL's rules, from tensors of the emulated device: at TP=2, and a
group for each of two pipeline stages."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.weights.sender import Sent
from tests.actor.tiny import save_tiny
from tests.coordinator.sync_kit import PoolTrainer, send
from tests.emulated.played_server import PlayedEngine
from tests.emulated.publish_kit import played_fleet
from tests.emulated.strict_ranks import Broken
from tests.emulated.test_strict_actor import chosen_as_on_cuda
from tools.rank_pool import RankPlace

pytestmark = pytest.mark.timeout(300)


def strict_send(place: RankPlace, *arguments: Any) -> list[Sent | None]:
    """`sync_kit.send` with what the actor chooses on CUDA."""
    from tests.emulated import strict_nccl

    with chosen_as_on_cuda():
        sent = send(place, *arguments)
        torch.distributed.barrier()  # the other rank's last parts are only enqueued when it gets here
    assert strict_nccl.faults == []
    return sent


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_the_actors_ranks_and_two_servers_meet_in_groups_of_their_own(
    strict: Any, tmp_path: Path, layout: dict[str, int]
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2", tied=False)

    def on_ranks(n: int, _: Any, *arguments: Any, timeout_s: float) -> list[Any]:
        results = strict(n, strict_send, *arguments, timeout_s=timeout_s)
        assert not any(isinstance(result, Broken) for result in results), results
        return results

    async def test() -> None:
        engines = [PlayedEngine(tmp_path / f"server{at}", folder) for at in range(2)]
        place = {"layout": layout, "ranks": math.prod(layout.values())}
        trainer = PoolTrainer(on_ranks, folder, "distributed", backend="nccl", bucket_bytes=200_000, **place)
        async with played_fleet(engines) as fleet:
            report = await fleet.publish_stream(trainer, 1)
            assert report.by_disk == {}
            assert len(report.servers) == 2  # each tensor's checksum is that of the actor's
            assert trainer.sent is not None
            assert trainer.sent.bytes > trainer.bucket_bytes, "in several buckets"

    asyncio.run(test())
