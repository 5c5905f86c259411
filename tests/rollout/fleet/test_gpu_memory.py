"""Servers leave their memory and take it back: when all is well, when one dies, when one does not do as told."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.errors import RolloutError
from rollout.fleet.weight_update import OnDisk
from rollout.weights.checksums import expected_checksums
from rollout.weights.sender import Sent
from rollout.weights.transport import Failure, Target
from tests.rollout.fleet_kit import FAST, check_tokens, fleet_of, request, run, until
from tests.rollout.standin import INFO, StandIn


def test_no_request_starts_while_the_servers_are_out_of_their_memory() -> None:
    async def test() -> None:
        servers = [StandIn() for _ in range(2)]
        async with fleet_of(*servers) as fleet:
            assert await fleet.release_memory() == (3.5, 3.5), "GiB of weights and KV cache, as the servers say"
            assert all(server.released for server in servers)
            asked = asyncio.ensure_future(fleet.generate(request()))
            await asyncio.sleep(0.1)
            assert not any(server.prompts for server in servers)
            await fleet.resume_memory()
            check_tokens(await asked, 1, 5)
            assert [server.calls.index("release") < server.calls.index("take back") for server in servers] == [True] * 2

    run(test)


class FromMemory:
    """Sends nothing: the servers "hold" the folder."""

    def __init__(self, folder: Path, *failing: str) -> None:
        self.folder, self.failing = folder, failing

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        failed = {each.url: Failure(reason="lost", answers=False) for each in targets if each.url in self.failing}
        return Sent(bytes=1, failures=failed, checksums={INFO: expected_checksums(self.folder, INFO)})

    @property
    def changed(self) -> bool:
        return False

    async def to_disk(self) -> OnDisk:
        return OnDisk(folder=self.folder)


def test_weights_come_between_their_memory_and_the_rest(folders: list[Path]) -> None:
    """No request starts before the server has its KV cache, although the publish is done."""

    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            await fleet.release_memory()
            await fleet.resume_memory(weights_only=True)
            assert server.released == {"kv_cache", "cuda_graph"}
            server.loaded = folders[0]
            report = await fleet.publish_stream(FromMemory(folders[0]), 1)
            assert list(report.servers) == [server.url]
            asked = asyncio.ensure_future(fleet.generate(request()))
            await asyncio.sleep(0.1)
            assert not server.prompts
            await fleet.resume_memory()
            check_tokens(await asked, 1, 5)
            await fleet.release_memory()  # all of it again
            await fleet.resume_memory()
            assert [call for call in server.calls if call.startswith("take")] == [
                "take back weights",
                "take back kv_cache cuda_graph",
                "take back",
            ]

    run(test)


def test_a_publish_that_every_server_fails_ends_before_the_memory_comes(folders: list[Path]) -> None:
    """None can be restarted until then; it comes back with the weights from disk."""

    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            await fleet.release_memory()
            await fleet.resume_memory(weights_only=True)
            async with asyncio.timeout(5):
                report = await fleet.publish_stream(FromMemory(folders[0], server.url), 1)
            assert (dict(report.servers), list(report.by_disk)) == ({}, [server.url])
            assert server.starts == 1
            await fleet.resume_memory()
            await until(lambda: fleet.members[0].state == "ready")
            assert (server.starts, server.loaded, fleet.members[0].weight_version) == (2, folders[0], 1)

    run(test)


def test_a_request_in_flight_is_an_error_and_nothing_is_released() -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.02)
        async with fleet_of(server) as fleet:
            asked = asyncio.ensure_future(fleet.generate(request()))
            await until(lambda: server.running)
            with pytest.raises(RolloutError, match="1 requests run"):
                await fleet.release_memory()
            check_tokens(await asked, 1, 5)
            assert not server.released

    run(test)


def test_a_server_that_dies_meanwhile_is_restarted_only_when_the_memory_is_the_servers_again(
    folders: list[Path],
) -> None:
    async def test() -> None:
        server, other = StandIn(), StandIn()
        async with fleet_of(server, other) as fleet:
            await fleet.publish(folders[0], 3)
            await fleet.release_memory()
            await server.die()
            await until(lambda: fleet.members[0].state == "down")
            await asyncio.sleep(0.5)
            assert server.starts == 1, "it would take memory that is the trainer's"
            await fleet.resume_memory()
            await until(lambda: fleet.members[0].state == "ready")
            assert server.starts == 2
            assert server.loaded == folders[0]

    run(test)


class Slow(StandIn):
    """Answers only once `loaded_model` is set: until then it is starting."""

    loaded_model = True

    async def start(self) -> None:
        await super().start()
        self.healthy = self.loaded_model


def test_a_server_that_does_not_leave_is_ended_and_so_is_one_that_is_starting() -> None:
    async def test() -> None:
        stuck, starting, good = StandIn(), Slow(), StandIn()
        stuck.hangs_on_release = True
        async with fleet_of(stuck, starting, good, timing=replace(FAST, load_deadline_s=0.3)) as fleet:
            starting.loaded_model = False
            await starting.die()
            await until(lambda: fleet.members[1].state == "starting" and starting.alive())
            await fleet.release_memory()
            assert good.released
            assert not stuck.alive(), "what it holds can be had only by its end"
            assert not starting.alive()
            stuck.hangs_on_release, starting.loaded_model = False, True
            await fleet.resume_memory()
            await until(lambda: all(status.state == "ready" for status in fleet.members))

    run(test)


def test_the_wait_for_servers_does_not_count_the_trainers_turn() -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server, fleet_deadline_s=0.5) as fleet:
            await fleet.release_memory()
            await server.die()
            asked = asyncio.ensure_future(fleet.generate(request()))
            await asyncio.sleep(1.0)
            assert not asked.done(), "out of turn for longer than rollout.fleet_deadline_s, but not lost"
            await fleet.resume_memory()
            check_tokens(await asked, 1, 5)

    run(test)
