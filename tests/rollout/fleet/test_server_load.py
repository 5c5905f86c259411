"""What servers tell of their KV cache and queue: summed up for the metrics, and minded by the balancer."""

import asyncio
from functools import partial

import pytest
from aiohttp import web

from rollout.fleet import supervision
from rollout.fleet.balancer import Balancer
from rollout.fleet.member import Member, State
from rollout.server.engine import RemoteServer
from rollout.wire.client import SglangClient
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


class Probed(StandIn):
    """Counts its probes."""

    probes = 0

    async def _health(self, request: web.Request) -> web.Response:
        self.probes += 1
        return await super()._health(request)


@pytest.mark.parametrize(("at_a_time", "least", "most"), [(32, 6, 21), (1, 2, 6)])
def test_more_servers_are_not_probed_more_often_in_sum(
    at_a_time: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAST has 50 ms between two probes: 20 a second, or with the turns of four servers 5."""

    async def test() -> None:
        monkeypatch.setattr(supervision, "PROBED", at_a_time)
        servers = [Probed() for _ in range(4)]
        async with fleet_of(*servers):
            before = [server.probes for server in servers]
            await asyncio.sleep(1.0)
            counts = [server.probes - had for server, had in zip(servers, before, strict=True)]
            assert all(least <= count <= most for count in counts), counts

    run(test)


@pytest.mark.parametrize("told", [True, False])
def test_groups_go_where_the_kv_cache_has_room(told: bool) -> None:
    """Two servers with as many requests, of which one uses four times as much: requests alone would be dealt out."""

    async def test() -> None:
        full, empty = StandIn(seconds_a_token=0.02), StandIn(seconds_a_token=0.02)
        full.load, empty.load = (0.8, 0), (0.2, 0) if told else None
        async with fleet_of(full, empty) as fleet:
            asked = [asyncio.ensure_future(fleet.generate(request(f"a{n}", tokens=400))) for n in range(8)]
            await until(lambda: all(len(server.running) == 4 for server in (full, empty)))
            await until(lambda: all(member.in_flight_then == 4 for member in fleet.members))
            asked += [asyncio.ensure_future(fleet.generate(request(f"b{n}", group="b", tokens=400))) for n in range(4)]
            await until(lambda: len(full.running) + len(empty.running) == 12)
            assert (len(full.running), len(empty.running)) in (((4, 8),) if told else ((4, 8), (8, 4)))
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    run(test)


def balancer_of(*uses: float | None, in_flight: int) -> Balancer:
    connect = partial(SglangClient, request_deadline_s=1.0)
    members = [Member(RemoteServer("http://127.0.0.1:1"), connect) for _ in uses]
    balancer = Balancer(members, 64)
    for member in members:
        member.enter(State.READY)
        member.in_flight = in_flight
    for member, use in zip(members, uses, strict=True):
        balancer.told(member, use)
    return balancer


def test_between_two_samples_what_was_sent_counts() -> None:
    """0.8 and 0.2 of 10 requests each: a request takes 0.05, so 12 single requests make the two even."""

    async def test() -> None:
        balancer = balancer_of(0.8, 0.2, in_flight=10)
        for number in range(16):
            await balancer.acquire(f"g{number}")
        assert [member.in_flight for member in balancer.members] == [12, 24]

    run(test)


def test_a_server_that_hangs_and_tells_an_old_figure_gets_no_more_than_twice_its_share() -> None:
    async def test() -> None:
        balancer = balancer_of(*[0.2] * 4, in_flight=20)
        for _ in range(5):
            for number, member in enumerate(balancer.members):
                balancer.told(member, 0.0 if number == 0 else 0.2)
            for number in range(20):
                await balancer.acquire(f"g{number}")
        hung, *others = (member.in_flight for member in balancer.members)
        assert hung <= 2 * max(others)

    run(test)


def test_what_waits_inside_a_server_counts() -> None:
    """20 of the first one's 120 requests run, all of the second's."""

    async def test() -> None:
        balancer = balancer_of(None, None, in_flight=20)
        first, second = balancer.members
        first.in_flight = 60
        balancer.told(first, 0.6, 40)
        balancer.told(second, 0.6, 0)
        for number in range(40):
            await balancer.acquire(f"g{number}")
        assert (first.in_flight, second.in_flight) == (60, 60)

    run(test)


@pytest.mark.parametrize("uses", [(0.8, None), (None, None), (0.0, 0.0)])
def test_requests_are_counted_where_use_says_nothing(uses: tuple[float | None, float | None]) -> None:
    async def test() -> None:
        balancer = balancer_of(*uses, in_flight=10)
        for number in range(4):
            await balancer.acquire(f"g{number}")
        assert [member.in_flight for member in balancer.members] == [12, 12]

    run(test)


def test_deterministic_runs_count_requests() -> None:
    async def test() -> None:
        servers = StandIn(), StandIn()
        for server, load in zip(servers, [(0.8, 0), (0.2, 0)], strict=True):
            server.load, server.says = load, {"enable_deterministic_inference": True}
        async with fleet_of(*servers, deterministic=True) as fleet:
            await until(lambda: fleet.statistics._sums["samples"] >= 4)
            assert [member.kv_use for member in fleet.members] == [None, None]

    run(test)
