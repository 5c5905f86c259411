"""What the trainer sends under `rollout.on_publish` recompute and keep, on stand-ins: half of the servers draws while
the other is sent to, and what becomes of servers that fail in either."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.errors import WeightMismatch
from rollout.fleet.fleet import RolloutFleet
from rollout.weights.transport import Failure
from tests.rollout.fleet.test_fleet_stream import FromMemory
from tests.rollout.fleet.test_on_publish import ROLLING, checked, drawing
from tests.rollout.fleet_kit import fleet_of, request, run, until
from tests.rollout.standin import StandIn

pytestmark = pytest.mark.parametrize("mode", ROLLING)


def slow_servers(count: int) -> list[StandIn]:
    return [StandIn(seconds_a_token=0.01) for _ in range(count)]


def ready(fleet: RolloutFleet) -> bool:
    return all(member.state == "ready" for member in fleet.members)


def urls(servers: list[StandIn]) -> tuple[str, ...]:
    return tuple(server.url for server in servers)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_half_draws_while_the_other_is_sent_to(folders: list[Path], mode: str, count: int) -> None:
    async def test() -> None:
        servers = slow_servers(count)
        async with fleet_of(*servers, max_running_requests=8, on_publish=mode) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            tasks = await drawing(fleet, servers, 2 * count)
            stream = FromMemory(folders[1], *servers)
            stream.seconds = 0.15

            def look() -> None:
                drawn_by = [server for server in servers if server.url not in stream.sent[-1]]
                assert not any(server.paused for server in drawn_by)
                assert all(server.running for server in drawn_by)

            stream.while_sending = look
            began = time.monotonic()
            publish = asyncio.ensure_future(fleet.publish_stream(stream, 2))
            await until(lambda: stream.sent)
            await fleet.generate(request("late", tokens=1))
            assert len(stream.sent) == 1, "another request begins and ends at a server that draws"
            report = await publish
            took = time.monotonic() - began
            answers = await asyncio.gather(*tasks)
        checked(answers)
        assert stream.sent == [urls(servers[: count // 2]), urls(servers[count // 2 :])]
        assert stream.more == [True, False]
        assert (report.bytes, report.by_disk, stream.written) == (200, {}, 0)
        assert report.servers == {server.url: 11 for server in servers}
        assert report.standstill_s == 0
        assert 0.15 < report.stopped_s < 0.8 * took, "each server for its own half"
        assert all(set(answer.weight_versions) == {1, 2} for answer in answers)
        assert sum(len(server.prompts) for server in servers) == 4 * count + 1, "each response keeps its place"

    run(test)


def test_servers_that_are_down_leave_the_halves_as_they_are(folders: list[Path], mode: str) -> None:
    """So that each keeps its process group. A half alone is sent to once, with nobody after it."""

    async def test() -> None:
        servers = slow_servers(4)
        async with fleet_of(*servers, on_publish=mode) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers, writes=False), 1)
            for lost, halves in ((0, [servers[1:2], servers[2:]]), (1, [servers[2:]])):
                await servers[lost].die()
                await until(lambda lost=lost: "waits for the next publish" in fleet.members[lost].reason)
                stream = FromMemory(folders[lost + 1], *servers, writes=False)
                await fleet.publish_stream(stream, lost + 2)
                assert stream.sent == [urls(half) for half in halves]
                assert stream.more == [True, False][-len(halves) :]

    run(test)


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_a_server_that_fails_in_either_half(folders: list[Path], mode: str, which: int, answers: bool) -> None:
    """It reads a folder, at once or restarted; the other half is sent to in any case, and its responses go on."""

    async def test() -> None:
        servers = slow_servers(2)
        async with fleet_of(*servers, max_running_requests=8, on_publish=mode) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            tasks = await drawing(fleet, servers, 4)
            stream = FromMemory(folders[1], *servers)
            failing = servers[which].url
            stream.fails = {failing: Failure(reason="the group broke", answers=answers)}
            report = await fleet.publish_stream(stream, 2)
            assert report.by_disk == {failing: "the group broke"}
            assert stream.more == [True, False]
            assert (failing in report.servers) == answers
            assert servers[1 - which].url in report.servers
            await until(lambda: ready(fleet))
            assert [member.weight_version for member in fleet.members] == [2, 2]
            assert stream.written == 1
            assert [server.starts for server in servers] == [1 + (not answers and at == which) for at in range(2)]
            checked(await asyncio.gather(*tasks))

    run(test)


def test_a_server_that_is_lost_before_its_turn_is_left_to_its_supervisor(folders: list[Path], mode: str) -> None:
    """Whether it is back by then, with the weights from disk, or not."""

    async def test() -> None:
        servers = slow_servers(4)
        async with fleet_of(*servers, on_publish=mode) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            stream = FromMemory(folders[1], *servers)
            stream.seconds = 1.0
            dying: list[asyncio.Future[None]] = []

            def lose() -> None:
                if len(stream.sent) == 1:
                    servers[3].may_start.clear()
                    dying.extend(asyncio.ensure_future(server.die()) for server in servers[2:])

            stream.while_sending = lose
            publish = asyncio.ensure_future(fleet.publish_stream(stream, 2))
            await until(lambda: servers[2].starts == 2 and fleet.members[2].state == "ready")
            assert len(stream.sent) == 1
            report = await publish
            assert stream.sent == [urls(servers[:2])]
            assert list(report.servers) == [server.url for server in servers[:2]]
            servers[3].may_start.set()
            await until(lambda: ready(fleet))
            assert [member.weight_version for member in fleet.members] == [2] * 4
            assert stream.written == 1

    run(test)


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("at", [1, 2])
def test_a_trainer_that_fails_leaves_no_server_paused(folders: list[Path], mode: str, at: int) -> None:
    """Servers that were verified before it go on; the others start anew, with what it wrote."""

    async def test() -> None:
        servers = slow_servers(2)
        async with fleet_of(*servers, on_publish=mode) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            stream = FromMemory(folders[1], *servers)
            stream.while_sending = lambda: _raise(OSError("lost")) if len(stream.sent) == at else None
            with pytest.raises(OSError, match="lost"):
                await fleet.publish_stream(stream, 2)
            await until(lambda: ready(fleet))
            assert len(stream.sent) == at
            assert [server.starts for server in servers] == ([2, 2] if at == 1 else [1, 2])
            assert not any(server.paused for server in servers)
            assert set((await fleet.generate(request())).weight_versions) == {2}

    run(test)


@pytest.mark.parametrize("at", [1, 2])
def test_a_publish_that_is_cancelled_leaves_no_server_paused(folders: list[Path], mode: str, at: int) -> None:
    async def test() -> None:
        servers = slow_servers(2)
        async with fleet_of(*servers, on_publish=mode) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            tasks = await drawing(fleet, servers, 4)
            stream = FromMemory(folders[1], *servers)
            publish = asyncio.ensure_future(fleet.publish_stream(stream, 2))
            await until(lambda: len(stream.sent) == at)
            publish.cancel()
            await asyncio.gather(publish, return_exceptions=True)
            checked(await asyncio.gather(*tasks))
            await until(lambda: ready(fleet))
            assert not any(server.paused for server in servers)
            assert all(member.gate.is_set() for member in fleet.members)

    run(test)


@pytest.mark.parametrize("which", [0, 1])
def test_a_wrong_tensor_in_either_half_never_serves(folders: list[Path], mode: str, which: int) -> None:
    async def test() -> None:
        servers = slow_servers(2)
        async with fleet_of(*servers, on_publish=mode, fleet_deadline_s=0.5) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            servers[which].corrupt = "model.layers.0.mlp.down_proj.weight"
            stream = FromMemory(folders[1], *servers)
            with pytest.raises(WeightMismatch, match=r"down_proj\.weight has 0000000000000000"):
                await fleet.publish_stream(stream, 2)
            assert len(stream.sent) == 1 + which, "who follows is not sent what one could not hold"
            assert fleet.members[which].state != "ready"

    run(test)


def test_a_response_moves_on_from_a_lost_half(folders: list[Path], mode: str) -> None:
    """It goes to the half that draws, by the version that this holds."""

    async def test() -> None:
        servers = slow_servers(2)
        for server in servers:
            server.stream_interval = 1
        async with fleet_of(*servers, max_running_requests=8, on_publish=mode, stream_every=1) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            tasks = await drawing(fleet, servers, 4, tokens=100)
            stream = FromMemory(folders[1], *servers)
            stream.seconds = 0.3
            dying: list[asyncio.Future[None]] = []
            strike: dict[int, Callable[[], None]] = {
                1: lambda: dying.append(asyncio.ensure_future(servers[0].die())),
            }
            stream.while_sending = lambda: strike.get(len(stream.sent), lambda: None)()
            stream.fails = {servers[0].url: Failure(reason="connection reset", answers=False)}
            report = await fleet.publish_stream(stream, 2)
            assert list(report.servers) == [servers[1].url]
            checked(await asyncio.gather(*tasks), 100)
            await until(lambda: ready(fleet))
            assert [member.weight_version for member in fleet.members] == [2, 2]

    run(test)
