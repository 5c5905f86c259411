"""What servers tell of their KV cache and queue: summed up for the metrics, and minded by the balancer."""

import asyncio

import pytest

from tests.rollout.fleet_kit import fleet_of, request, run, until
from tests.rollout.standin import StandIn


@pytest.mark.parametrize("packs", [True, False])
def test_a_step_has_the_sums_of_samples_and_answers(packs: bool) -> None:
    async def test() -> None:
        servers = StandIn(), StandIn()
        for server, load in zip(servers, [(0.25, 0), (0.75, 4)], strict=True):
            server.load, server.packs, server.stream_interval = load, packs, 2
        async with fleet_of(*servers, stream_every=2) as fleet:
            for name in ("a", "b"):
                await fleet.generate(request(name, prompt=range(12), tokens=5))
            await until(lambda: fleet.statistics._sums["samples"] >= 20)
            told = fleet.statistics.take()
            assert told.pop("servers/kv_use") == pytest.approx(0.5, abs=0.1)
            assert told.pop("servers/queue") == pytest.approx(2, abs=0.4)
            assert told == {
                "servers/kv_use_max": 0.75,
                "servers/queue_max": 4,
                "servers/prefix_hits": 0.25,
                "servers/retractions": 4,
            }
            assert fleet.statistics.take() == {}

    run(test)


def test_a_server_that_does_not_tell_is_none_the_worse() -> None:
    async def test() -> None:
        reports: list[str] = []
        server = StandIn()
        async with fleet_of(server, reports=reports) as fleet:
            await asyncio.sleep(0.5)
            await fleet.generate(request())
            assert fleet.statistics.take().keys() == {"servers/prefix_hits", "servers/retractions"}
        assert reports == []

    run(test)
