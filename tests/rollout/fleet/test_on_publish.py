"""`rollout.on_publish` with stand-ins: who stands still, which weights draw which token, and servers that fail."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.errors import ServerRefused, ServerUnfit, WeightMismatch
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import FinishReason, Generation, ThinkingLimit
from tests.rollout.fleet_kit import FAST, check_tokens, fleet_of, request, run, until
from tests.rollout.standin import StandIn

ROLLING = ["recompute", "keep"]


async def drawing(fleet: RolloutFleet, servers: list[StandIn], count: int, tokens: int = 60) -> list[asyncio.Future]:
    """So many requests, each of a group of its own, all of them at a server."""
    tasks = [asyncio.ensure_future(fleet.generate(request(f"r{i}", tokens=tokens))) for i in range(count)]
    await until(lambda: sum(len(server.running) for server in servers) == count)
    return tasks


def checked(answers: list[Generation], tokens: int = 60) -> None:
    for answer in answers:
        check_tokens(answer, 1, tokens)
        assert answer.finish_reason is FinishReason.LENGTH
        assert (np.diff(answer.weight_versions) >= 0).all()


@pytest.mark.parametrize("mode", ["restart", *ROLLING])
def test_who_stands_still_while_servers_read_a_folder(folders: list[Path], mode: str) -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.02) for _ in range(4)]
        async with fleet_of(*servers, max_running_requests=8, on_publish=mode) as fleet:
            await fleet.publish(folders[0], 1)
            tasks = await drawing(fleet, servers, 8)
            for server in servers:
                server.slow_updates = 0.15
            publish = asyncio.ensure_future(fleet.publish(folders[1], 2))
            most_paused, began_meanwhile, calls = 0, 0, sum(len(server.prompts) for server in servers)
            late = asyncio.ensure_future(fleet.generate(request("late", tokens=1)))
            while not publish.done():
                most_paused = max(most_paused, sum(server.paused for server in servers))
                began_meanwhile += late.done()
                await asyncio.sleep(0.005)
            report = publish.result()
            answers = await asyncio.gather(*tasks)
        checked(answers)
        assert report.servers == {server.url: 11 for server in servers}
        assert all(set(answer.weight_versions) == {1, 2} for answer in answers)
        assert most_paused == (4 if mode == "restart" else 2)
        assert (began_meanwhile > 0) == (mode != "restart"), "another request begins at a server that draws"
        assert (report.standstill_s > 0.1) == (mode == "restart")
        assert 0.15 < report.stopped_s < 1
        assert sum(len(server.prompts) for server in servers) == calls + 8 + 1
        for server in servers:
            update = server.calls.index("update 2")
            flushed = [] if mode == "keep" else ["flush"]
            assert server.calls[update - 1 : update + 1 + len(flushed) + 1] == ["pause", "update 2", *flushed, "resume"]
            assert ("flush" in server.calls[server.calls.index("resume") :]) == (mode != "keep")

    run(test)


@pytest.mark.parametrize("mode", ROLLING)
def test_a_response_keeps_its_place_at_its_server(folders: list[Path], mode: str) -> None:
    """More wait than have a place, and more urgently: restart would give the place to them."""

    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.01) for _ in range(2)]
        async with fleet_of(*servers, max_running_requests=2, on_publish=mode) as fleet:
            await fleet.publish(folders[0], 1)
            tasks = await drawing(fleet, servers, 4)
            urgent = [replace(request(f"u{i}", tokens=5, prompt=(3,)), priority=-1) for i in range(4)]
            later = [asyncio.ensure_future(fleet.generate(one)) for one in urgent]
            await fleet.publish(folders[1], 2)
            checked(await asyncio.gather(*tasks))
            await asyncio.gather(*later)
        for server in servers:
            again = [prompt for prompt in server.prompts if prompt[0] == 7]
            assert [len(prompt) > 1 for prompt in again] == [False, False, True, True]
            behind = server.prompts[server.prompts.index(again[-1]) + 1 :].count([3])
            assert behind == server.prompts.count([3])
            # Only under keep: the key is the version with which the response came there.
            keys = ["1"] * 4 + ["2"] * behind if mode == "keep" else [None] * (4 + behind)
            assert server.cache_keys == keys
        assert sum(server.prompts.count([3]) for server in servers) == 4

    run(test)


def test_keep_finds_only_its_own_prefixes(folders: list[Path]) -> None:
    """A response that moves, and a new one, read nothing that older weights left."""

    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.02) for _ in range(2)]
        async with fleet_of(*servers, max_running_requests=2, on_publish="keep") as fleet:
            await fleet.publish(folders[0], 1)
            (task,) = await drawing(fleet, servers, 1)
            home, other = sorted(servers, key=lambda server: not server.running)
            await fleet.publish(folders[1], 2)
            await until(lambda: home.running)
            await fleet.generate(request("new", "r0", tokens=1))
            home.may_start.clear()
            await home.die()
            checked([await task])
            assert home.cache_keys == ["1", "1", "2"]
            assert other.cache_keys == ["2"], "its version when the response came there"
            # What comes back reads the weights and forgets all it held.
            other.calls.clear()
            home.calls.clear()
            home.may_start.set()
            await until(lambda: all(member.state == "ready" for member in fleet.members))
            assert home.calls == ["flush", "pause", "update 2", "flush", "resume"]
            await fleet.publish(folders[2], 3)
            assert other.calls == ["pause", "update 3", "resume"]

    run(test)


def test_what_a_server_held_before_the_run_is_forgotten(folders: list[Path]) -> None:
    """Servers of `rollout.urls` outlive a run, and version numbers come again."""

    async def test() -> None:
        server = StandIn()
        server.ours = False
        async with fleet_of(server, on_publish="keep") as fleet:
            server.calls.clear()
            await fleet.publish(folders[0], 1)
            assert server.calls == ["resume", "flush", "pause", "update 1", "flush", "resume"]
            server.calls.clear()
            await fleet.publish(folders[1], 2)
            assert server.calls == ["resume", "pause", "update 2", "resume"]

    run(test)


@pytest.mark.parametrize("option", ["disable_radix_cache", "enable_deterministic_inference", "strip_thinking_cache"])
def test_keep_refuses_a_server_that_keeps_nothing(option: str) -> None:
    async def test() -> None:
        server = StandIn()
        server.says = {option: True}
        async with fleet_of(server, on_publish="recompute"):
            pass
        with pytest.raises(ServerUnfit, match="prefix cache"):
            async with fleet_of(server, on_publish="keep"):
                pass

    run(test)


class Failing(StandIn):
    """Fails in the middle of a publish, as told."""

    how = ""

    async def _abort(self, request: Any) -> Any:
        return await (asyncio.sleep(60) if self.how == "ends nothing" else super()._abort(request))

    async def _pause(self, request: Any) -> Any:
        answer = await super()._pause(request)
        if self.how == "dies in the pause":
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.die()))
            await asyncio.sleep(1)
        return answer

    async def _update(self, request: Any) -> Any:
        if self.how == "is late":
            await asyncio.sleep(60)
        return await super()._update(request)

    async def start(self) -> None:
        if self.starts:
            self.how = ""
        await super().start()


@pytest.mark.parametrize("mode", ROLLING)
@pytest.mark.parametrize("how", ["dies in the pause", "ends nothing", "is late"])
def test_a_server_that_fails_in_a_publish(folders: list[Path], how: str, mode: str) -> None:
    """Its responses go on elsewhere, with what they have; it comes back with the new weights; nobody else notices."""

    async def test() -> None:
        servers = [Failing(seconds_a_token=0.01), StandIn(seconds_a_token=0.01)]
        timing = replace(FAST, control_deadline_s=0.4, load_deadline_s=1.0)
        settings: dict[str, Any] = {"max_running_requests": 8, "on_publish": mode, "timing": timing, "stream_every": 1}
        for server in servers:
            server.stream_interval = 1
        async with fleet_of(*servers, **settings) as fleet:
            await fleet.publish(folders[0], 1)
            tasks = await drawing(fleet, servers, 6, tokens=150)
            servers[0].how = how  # type: ignore[attr-defined]
            report = await fleet.publish(folders[1], 2)
            checked(await asyncio.gather(*tasks), 150)
            await until(lambda: all(member.state == "ready" for member in fleet.members))
            assert [member.weight_version for member in fleet.members] == [2, 2]
            assert servers[1].url in report.servers
            assert [server.starts for server in servers] == [2, 1]

    run(test)


@pytest.mark.parametrize("mode", ROLLING)
def test_no_server_serves_what_is_refused_or_not_verified(folders: list[Path], mode: str) -> None:
    async def publish(fault: Callable[[StandIn], None], error: type[Exception]) -> None:
        servers = [StandIn(seconds_a_token=0.01) for _ in range(2)]
        async with fleet_of(*servers, max_running_requests=2, on_publish=mode, fleet_deadline_s=0.5) as fleet:
            await fleet.publish(folders[0], 1)
            tasks = await drawing(fleet, servers, 4, tokens=500)
            fault(servers[1])
            with pytest.raises(error):
                await fleet.publish(folders[1], 2)
            update = servers[1].calls.index("update 2")
            assert "generate 2" not in servers[1].calls[update:]
            for task in tasks:
                task.cancel()

    async def test() -> None:
        await publish(lambda server: setattr(server, "refuse_updates", True), ServerRefused)
        await publish(lambda server: setattr(server, "corrupt", "model.layers.0.mlp.down_proj.weight"), WeightMismatch)

    run(test)


@pytest.mark.parametrize("mode", ROLLING)
def test_what_is_held_waits_beyond_a_publish_and_a_cancelled_one_gives_its_place_back(
    folders: list[Path], mode: str
) -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.01)
        async with fleet_of(server, max_running_requests=4, on_publish=mode) as fleet:
            await fleet.publish(folders[0], 1)
            held = [replace(request(f"h{i}", tokens=40), holdable=True) for i in range(2)]
            tasks = [asyncio.ensure_future(fleet.generate(one)) for one in held]
            await until(lambda: len(server.running) == 2)
            await asyncio.sleep(0.05)
            await fleet.hold()
            await fleet.publish(folders[1], 2)
            assert not server.running
            assert fleet.members[0].in_flight == 0
            fleet.let_go()
            answers = await asyncio.gather(*tasks)
            checked(answers, 40)
            assert all(set(answer.weight_versions) == {1, 2} for answer in answers)
            server.slow_updates = 0.2
            (task,) = await drawing(fleet, [server], 1)
            publish = asyncio.ensure_future(fleet.publish(folders[2], 3))
            await until(lambda: server.paused)
            task.cancel()
            await publish
            assert (fleet.members[0].in_flight, fleet.members[0].drawing) == (0, 0)

    run(test)


@pytest.mark.parametrize("mode", ROLLING)
def test_a_publish_that_is_cancelled_leaves_no_server_paused(folders: list[Path], mode: str) -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.01) for _ in range(2)]
        async with fleet_of(*servers, max_running_requests=2, on_publish=mode) as fleet:
            tasks = await drawing(fleet, servers, 4, tokens=30)
            for server in servers:
                server.slow_updates = 0.3
            publish = asyncio.ensure_future(fleet.publish(folders[0], 1))
            await until(lambda: any(server.paused for server in servers))
            publish.cancel()
            for server in servers:
                server.slow_updates = 0.0
            checked(await asyncio.gather(*tasks), 30)
            assert not any(server.paused for server in servers)
            assert all(member.gate.is_set() for member in fleet.members)

    run(test)


@pytest.mark.parametrize("mode", ROLLING)
def test_a_budget_of_thinking_goes_on_through_a_publish(folders: list[Path], mode: str) -> None:
    async def test() -> None:
        limit = ThinkingLimit(budget=20, end_ids=(3, 4), ended=lambda drawn: False)
        server = StandIn(seconds_a_token=0.01)
        async with fleet_of(server, on_publish=mode) as fleet:
            await fleet.publish(folders[0], 1)
            one = request("t", tokens=40)
            asked = replace(one, sampling=replace(one.sampling, thinking=limit))
            task = asyncio.ensure_future(fleet.generate(asked))
            for folder, version, tokens in ((folders[1], 2, 10), (folders[2], 3, 30)):
                await until(lambda tokens=tokens: server.running and (server.prompts[-1:][0][1:] or tokens < 20))
                await asyncio.sleep(0.05)
                await fleet.publish(folder, version)
            answer = await task
        assert answer.given == ((20, 2),)
        assert answer.drawn == 40
        places = np.delete(1 + np.arange(42), [20, 21])
        np.testing.assert_array_equal(answer.drawn_ids, 10 * answer.weight_versions + places % 10)
        assert (np.diff(answer.weight_versions) >= 0).all()
        assert len(set(answer.weight_versions.tolist())) > 1

    run(test)
