"""The project's process groups over the strict backend: all are NCCL's, and all ranks make them in one order."""

from typing import Any

import torch.distributed as dist

from megatron_dapo.config.actor_config import LayoutConfig
from tests.emulated.strict_ranks import GPU
from tools.rank_pool import RankPlace


def backends(place: RankPlace, layout: dict[str, Any]) -> set[str]:
    """Of every group that this rank is in."""
    from megatron_dapo.actor.device import DeviceChoice, process_groups

    process_groups.initialise(
        LayoutConfig(**layout),
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        device=DeviceChoice(device=GPU, backend="nccl"),
        timeout_s=60,
        seed=1,
    )
    found = {dist.get_backend(group) for group in dist.distributed_c10d._world.pg_map}
    process_groups.shutdown()
    return found


def test_no_gloo_group_stands_beside_nccls(strict):
    """gloo would look for an address by the machine's name, which on many nodes is a loopback one."""
    assert strict(2, backends, {"data": 2}) == [{"nccl"}] * 2
