"""Process groups come up by the layout, go down again, and no collective waits for ever."""

import socket
import time
from dataclasses import replace

import pytest
import torch

from megatron_dapo.config.actor_config import LayoutConfig
from tests.actor.gloo import RankPlace


def start(place: RankPlace, layout: dict, timeout_s: float = 30) -> None:
    from megatron_dapo.actor.device import prepare

    device = prepare("cpu")
    from megatron_dapo.actor.device.process_groups import initialise

    initialise(
        LayoutConfig(**layout),
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        device=device,
        timeout_s=timeout_s,
        seed=1,
    )


def coordinates(place: RankPlace, layout: dict) -> tuple[int, ...]:
    start(place, layout)
    from megatron.core import parallel_state

    from megatron_dapo.actor.device.process_groups import shutdown

    found = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    shutdown()
    assert not torch.distributed.is_initialized()
    return found


def test_ranks_are_ordered_tensor_context_data_pipeline(gloo):
    assert gloo(2, coordinates, {"tensor": 2}) == [(0, 0, 0, 0), (1, 0, 0, 0)]
    assert gloo(2, coordinates, {"context": 2}) == [(0, 0, 0, 0), (0, 1, 0, 0)]
    assert gloo(2, coordinates, {"data": 2}) == [(0, 0, 0, 0), (0, 0, 1, 0)]
    assert gloo(2, coordinates, {"pipeline": 2}) == [(0, 0, 0, 0), (0, 0, 0, 1)]


@pytest.mark.slow
def test_ranks_of_two_dimensions(gloo):
    got = gloo(4, coordinates, {"tensor": 2, "pipeline": 2}, timeout_s=280)
    assert got == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 1)]


def listening(place: RankPlace, port: int) -> set[str]:
    """Addresses that this rank's process listens on."""
    import psutil

    start(replace(place, rendezvous=f"tcp://127.0.0.1:{port}"), {"tensor": 2})
    return {each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


def test_ranks_that_meet_on_loopback_listen_nowhere_else(gloo):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert gloo(2, listening, port) == [{"127.0.0.1"}, {"127.0.0.1"}]


def wait_for_a_peer_that_never_comes(place: RankPlace, group: str) -> float:
    start(place, {"tensor": 2} if group == "tensor" else {"data": 2}, timeout_s=4)
    from megatron.core import parallel_state

    if place.rank == 1:
        time.sleep(8)
        return 0.0
    began = time.monotonic()
    groups = {
        "tensor": parallel_state.get_tensor_model_parallel_group,
        "data": parallel_state.get_data_parallel_group,
    }
    with pytest.raises(RuntimeError):
        torch.distributed.all_reduce(torch.zeros(1), group=groups[group]())
    return time.monotonic() - began


@pytest.mark.parametrize("group", ["tensor", pytest.param("data", marks=pytest.mark.slow)])
def test_a_collective_ends_at_its_deadline(gloo, group):
    gloo(2, coordinates, {"tensor": 2})  # both processes have imported what they need: no rank joins late
    waited, _ = gloo(2, wait_for_a_peer_that_never_comes, group)
    assert 3 < waited < 7.5
