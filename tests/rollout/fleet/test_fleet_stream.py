"""Weights published without a file, on stand-in servers: what a failure on the way does to servers and requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from rollout.errors import FleetLost, WeightMismatch
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.member import Member
from rollout.fleet.weight_update import OnDisk
from rollout.weights.checksums import expected_checksums
from rollout.weights.sender import Sent
from rollout.weights.transport import Failure, Target
from tests.rollout.fleet_kit import FAST, check_tokens, fleet_of, request, run, until
from tests.rollout.standin import INFO, StandIn


class FromMemory:
    """A trainer that holds the weights of `folder`: they appear in the stand-ins, except where a failure is planted."""

    def __init__(self, folder: Path, *servers: StandIn, writes: bool = True) -> None:
        self.folder, self.servers, self.writes = folder, servers, writes
        self.fails: dict[str, Failure] = {}
        self.written = 0
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.while_sending: Callable[[], None] = lambda: None
        self.sent: list[tuple[str, ...]] = []
        self.more: list[bool] = []
        self.seconds = 0.05

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        self.sent.append(tuple(target.url for target in targets))
        self.more.append(more)
        by_url = {server.url: server for server in self.servers}
        self.while_sending()
        await asyncio.sleep(self.seconds)
        for target in targets:
            server = by_url.get(target.url)
            if server is not None and target.url not in self.fails:
                assert server.paused
                assert not server.running
                server.loaded, server.label = self.folder, label
        failures = {url: failure for url, failure in self.fails.items() if url in self.sent[-1]}
        return Sent(bytes=100, failures=failures, checksums={INFO: expected_checksums(self.folder, INFO)})

    @property
    def changed(self) -> bool:
        return not self.writes

    async def to_disk(self) -> OnDisk | None:
        await self.may_write.wait()
        self.written += 1
        return OnDisk(folder=self.folder) if self.writes else None


def test_servers_serve_what_was_sent_and_running_responses_go_on(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.02) for _ in range(2)]
        async with fleet_of(*servers) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            tasks = [asyncio.ensure_future(fleet.generate(request(f"r{i}", tokens=20))) for i in range(4)]
            await until(lambda: all(server.running for server in servers))
            stream = FromMemory(folders[1], *servers)
            report = await fleet.publish_stream(stream, 2)
            assert (report.bytes, report.by_disk, stream.written) == (100, {}, 0)
            assert report.servers == {server.url: 11 for server in servers}
            for generation in await asyncio.gather(*tasks):
                check_tokens(generation, 1, 20)
                assert generation.weight_versions[-1] == 2
            assert not any(server.paused for server in servers)
            assert all("flush" in server.calls for server in servers)

    run(test)


class Slow(StandIn):
    seconds = 0.0

    async def _pause(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.seconds)
        return await super()._pause(request)


def test_servers_are_sent_to_in_the_fleets_order_whichever_pauses_first(folders: list[Path]) -> None:
    """Else their process group would be made anew in nearly every publish."""

    async def test() -> None:
        servers = [Slow() for _ in range(3)]
        async with fleet_of(*servers) as fleet:
            stream = FromMemory(folders[0], *servers)
            for version, seconds in enumerate(((0.0, 0.1, 0.2), (0.2, 0.1, 0.0), (0.1, 0.2, 0.0)), 1):
                for server, each in zip(servers, seconds, strict=True):
                    server.seconds = each
                await fleet.publish_stream(stream, version)
            assert stream.sent == [tuple(server.url for server in servers)] * 3

    run(test)


def test_a_server_that_could_not_take_them_but_answers_reads_them_from_disk(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers) as fleet:
            stream = FromMemory(folders[0], *servers)
            stream.fails = {servers[0].url: Failure(reason="the group broke", answers=True)}
            report = await fleet.publish_stream(stream, 1)
            assert report.by_disk == {servers[0].url: "the group broke"}
            assert len(report.servers) == 2
            assert (stream.written, servers[0].starts, servers[1].starts) == (1, 1, 1)
            assert "update 1" in servers[0].calls
            assert "update 1" not in servers[1].calls
            assert {member.weight_version for member in fleet.members} == {1}

    run(test)


def test_a_server_that_does_not_answer_is_restarted_and_reads_them_from_disk(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers) as fleet:
            stream = FromMemory(folders[0], *servers)
            stream.fails = {servers[0].url: Failure(reason="no answer", answers=False)}
            report = await fleet.publish_stream(stream, 1)
            assert len(report.servers) == 1
            await until(lambda: all(seen.state == "ready" for seen in fleet.members))
            assert [seen.restarts for seen in fleet.members] == [1, 0]
            assert {seen.weight_version for seen in fleet.members} == {1}
            assert stream.written == 1

    run(test)


class OfOthers(StandIn):
    """Nobody here can restart it. Its device waits in a broken process group until `free`."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = False
        self.free = asyncio.Event()
        self.free.set()

    async def restart(self, weights: tuple[Path, str] | None = None) -> None:
        return None

    async def _checksums(self, request: web.Request) -> web.Response:
        await self.free.wait()
        return await super()._checksums(request)


def test_a_server_of_others_is_asked_for_nothing_until_it_left_a_broken_group(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(), OfOthers()]
        async with fleet_of(*servers) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            servers[1].free.clear()
            calls = len(servers[1].calls)
            stream = FromMemory(folders[1], *servers)
            stream.fails = {servers[1].url: Failure(reason="the group broke", answers=False)}
            await fleet.publish_stream(stream, 2)
            await asyncio.sleep(2.5)  # more than two deadlines of its scheduler
            assert fleet.members[1].state != "ready"
            assert set(servers[1].calls[calls:]) <= {"pause", "resume", "flush"}, "of the publish itself"
            assert not any(call.startswith("update") for call in servers[1].calls[calls:])
            after = len(servers[1].calls)
            assert set((await fleet.generate(request())).weight_versions) == {2}
            assert len(servers[1].calls) == after
            servers[1].free.set()
            await until(lambda: fleet.members[1].state == "ready")
            assert "update 2" in servers[1].calls[after:]

    run(test)


def test_a_server_that_reports_no_checksums_keeps_a_publish_for_its_deadline_alone(folders: list[Path]) -> None:
    """Over NCCL it is the first answer that needs the data."""

    async def test() -> None:
        servers = [StandIn(), OfOthers()]
        async with fleet_of(*servers, sync_deadline_s=1.0, timing=replace(FAST, load_deadline_s=600.0)) as fleet:
            servers[1].ours = True
            servers[1].free.clear()
            async with asyncio.timeout(10):
                report = await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            assert list(report.servers) == [servers[0].url]
            assert fleet.members[1].state != "ready"

    run(test)


def test_a_server_that_dies_meanwhile_keeps_nobody_waiting(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers) as fleet:
            stream = FromMemory(folders[0], *servers)
            dying: list[asyncio.Future[None]] = []
            stream.while_sending = lambda: dying.append(asyncio.ensure_future(servers[0].die()))
            stream.fails = {servers[0].url: Failure(reason="connection reset", answers=False)}
            await fleet.publish_stream(stream, 1)
            for generation in await asyncio.gather(*(fleet.generate(request(f"r{i}")) for i in range(4))):
                assert set(generation.weight_versions) == {1}
            await until(lambda: all(seen.weight_version == 1 and seen.state == "ready" for seen in fleet.members))

    run(test)


def test_a_server_restarted_later_gets_them_while_the_trainer_has_them(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers) as fleet:
            stream = FromMemory(folders[0], *servers)
            await fleet.publish_stream(stream, 1)
            assert stream.written == 0
            for _ in range(2):  # written for the first restart alone
                starts = servers[0].starts
                await servers[0].die()
                await until(lambda before=starts: servers[0].starts > before and fleet.members[0].state == "ready")
            assert fleet.members[0].weight_version == 1
            assert stream.written == 1

    run(test)


def test_weights_that_are_gone_are_not_served_and_the_next_ones_are(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers) as fleet:
            await fleet.publish_stream(FromMemory(folders[0], *servers, writes=False), 1)
            await servers[0].die()
            await until(lambda: "waits for the next publish" in fleet.members[0].reason)
            assert set((await fleet.generate(request())).weight_versions) == {1}  # by the other one
            stream = FromMemory(folders[1], *servers)
            report = await fleet.publish_stream(stream, 2)
            assert stream.sent == [(servers[1].url,)]
            assert list(report.servers) == [servers[1].url]
            await until(lambda: fleet.members[0].state == "ready")
            assert fleet.members[0].weight_version == 2

    run(test)


@asynccontextmanager
async def waiting_alone(stream: "FromMemory", server: StandIn) -> AsyncIterator[RolloutFleet]:
    """A fleet whose one server died after the publish of `stream` and waits for the next, past every deadline."""
    timing = replace(FAST, load_deadline_s=0.3)
    async with fleet_of(server, timing=timing, start_s=0.5, fleet_deadline_s=0.2) as fleet:
        await fleet.publish_stream(stream, 1)
        await server.die()
        await until(lambda: "waits for the next publish" in fleet.members[0].reason)
        yield fleet


def test_a_lone_server_waits_for_the_next_publish_for_as_long_as_the_update_takes(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        async with waiting_alone(FromMemory(folders[0], server, writes=False), server) as fleet:
            answer = asyncio.ensure_future(fleet.generate(request()))
            await asyncio.sleep(1.5)
            assert not answer.done(), "lost, though it only waits"
            await fleet.publish_stream(FromMemory(folders[1], server), 2)
            assert set((await answer).weight_versions) == {2}

    run(test)


def test_weights_that_nobody_will_replace_are_not_waited_for(folders: list[Path]) -> None:
    """Colocated servers have the GPUs: the trainer writes nothing, and publishes only after the rollout."""

    class Held(FromMemory):
        changed = False

    async def test() -> None:
        server = StandIn()
        async with waiting_alone(Held(folders[0], server, writes=False), server) as fleet:
            with pytest.raises(FleetLost, match="it waits for the next publish"):
                await fleet.generate(request())

    run(test)


def test_with_every_server_lost_a_publish_ends_by_its_deadline(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        timing = replace(FAST, load_deadline_s=0.5)
        async with fleet_of(server, timing=timing, start_s=1.0, fleet_deadline_s=0.5) as fleet:
            stream = FromMemory(folders[0], server)
            stream.may_write.clear()
            stream.fails = {server.url: Failure(reason="no answer", answers=False)}
            with pytest.raises(FleetLost, match="all servers are down for longer than"):
                await fleet.publish_stream(stream, 1)

    run(test)


def test_a_server_restarted_while_the_others_are_sent_to_is_left_to_its_supervisor(folders: list[Path]) -> None:
    """It has another address then, and does not hold what was sent to the old one."""

    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers) as fleet:
            stream = FromMemory(folders[0], *servers)
            old, both = servers[0].url, stream.send

            async def slow(targets: Sequence[Target], label: str, *, more: bool) -> Sent:
                stream.fails = {old: Failure(reason="connection reset", answers=False)}
                await servers[0].die()
                await until(lambda: servers[0].starts == 2 and fleet.members[0].state == "ready")
                return await both(targets, label, more=more)

            stream.send = slow  # type: ignore[method-assign]
            report = await fleet.publish_stream(stream, 1)
            assert list(report.servers) == [servers[1].url]
            assert list(report.by_disk) == [old]
            assert [seen.state for seen in fleet.members] == ["ready", "ready"]
            assert [seen.weight_version for seen in fleet.members] == [1, 1]
            assert [seen.restarts for seen in fleet.members] == [1, 0]

    run(test)


def test_a_wrong_tensor_is_named_and_never_serves(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers) as fleet:
            servers[1].corrupt = "model.layers.0.mlp.down_proj.weight"
            with pytest.raises(WeightMismatch, match=r"down_proj\.weight has 0000000000000000"):
                await fleet.publish_stream(FromMemory(folders[0], *servers), 1)
            assert fleet.members[1].state != "ready"

    run(test)


def test_a_publish_that_is_given_up_leaves_no_server_paused(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            stream = FromMemory(folders[0], server)
            task = asyncio.ensure_future(fleet.publish_stream(stream, 1))
            await until(lambda: server.paused)
            task.cancel()
            assert set((await fleet.generate(request())).weight_versions) == {1}
            assert server.starts == 2
            assert not server.paused

    run(test)


def test_a_publish_that_is_given_up_right_after_the_pause_leaves_no_server_paused(folders: list[Path]) -> None:
    """The cancellation comes when nothing is awaited any more, and before the weights are sent."""

    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            pause = fleet._publisher._pause

            async def pause_and_cancel(member: Member) -> Target:
                target = await pause(member)
                asyncio.get_running_loop().call_soon(task.cancel)
                return target

            fleet._publisher._pause = pause_and_cancel  # type: ignore[method-assign]
            stream = FromMemory(folders[0], server)
            task = asyncio.ensure_future(fleet.publish_stream(stream, 1))
            await asyncio.gather(task, return_exceptions=True)
            assert not stream.sent
            assert set((await fleet.generate(request())).weight_versions) == {1}
            assert not server.paused

    run(test)
