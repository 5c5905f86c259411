"""Servers that come late, or come back: what is awaited, what is not, and that they come side by side; servers that a
run with FP8 weights refuses."""

import asyncio
import errno
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dapo.monitor.console import Console
from rollout.config import QUANTIZATION, RolloutConfig
from rollout.errors import FleetLost, ServerStartError, ServerUnfit
from rollout.fleet.fleet import RolloutFleet
from tests.rollout.fleet_kit import FAST, VOCABULARY, check_tokens, fleet_of, request, run, until
from tests.rollout.standin import StandIn


class SlowToAnswer(StandIn):
    """Its process is there at once, and answers when it is told to."""

    async def start(self) -> None:
        await super().start()
        self.healthy = False


def test_a_first_restart_may_take_longer_than_all_servers_may_be_down() -> None:
    """A 32B server loads for minutes: a restart of all of them is no loss of the fleet."""

    async def test() -> None:
        server = StandIn()
        async with fleet_of(server, fleet_deadline_s=0.3) as fleet:
            server.may_start.clear()
            await server.die()
            waiting = asyncio.ensure_future(fleet.generate(request()))
            await until(lambda: server.starts == 2)
            await asyncio.sleep(1.5)
            assert not waiting.done()
            server.may_start.set()
            check_tokens(await waiting, 1, 5)

    run(test)


def test_servers_that_do_not_come_back_from_their_first_restart_are_lost() -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server, fleet_deadline_s=0.3) as fleet:
            server.start_fails = True
            await server.die()
            async with asyncio.timeout(10):
                with pytest.raises(FleetLost, match="all servers are down"):
                    await fleet.generate(request())

    run(test)


def test_a_start_that_cannot_succeed_any_more_ends_at_once() -> None:
    async def test() -> None:
        servers = [StandIn() for _ in range(20)]
        for bad in servers[:3]:
            bad.start_fails = True
        servers[19].may_start.clear()
        fleet = RolloutFleet(RolloutConfig(), servers, vocab_size=VOCABULARY, report=print, timing=FAST)
        async with asyncio.timeout(30):
            with pytest.raises(ServerStartError, match="3 of 20 servers did not start"):
                await fleet.start(600.0)

    run(test)


def test_a_server_that_was_only_slow_is_not_started_again() -> None:
    async def test() -> None:
        slow = SlowToAnswer()
        async with fleet_of(*(StandIn() for _ in range(9)), slow) as fleet:
            assert fleet.members[9].state != "ready"
            slow.healthy = True
            await until(lambda: fleet.members[9].state == "ready")
        assert slow.starts == 1

    run(test)


def test_a_server_that_comes_late_is_looked_at_like_the_others() -> None:
    async def test() -> None:
        unfit, reports = SlowToAnswer(), list[str]()
        unfit.says = {"quantization": "fp8"}
        async with fleet_of(*(StandIn() for _ in range(9)), unfit, reports=reports) as fleet:
            unfit.healthy = True
            await until(lambda: any("it runs with quantization" in line for line in reports))
            assert fleet.members[9].state != "ready"

    run(test)


def test_servers_restart_side_by_side_and_memory_is_left_when_none_starts() -> None:
    async def test() -> None:
        servers = [StandIn() for _ in range(3)]
        async with fleet_of(*servers) as fleet:
            for server in servers[:2]:
                server.may_start.clear()
                await server.die()
            await until(lambda: [server.starts for server in servers] == [2, 2, 1])
            leaving = asyncio.ensure_future(fleet.release_memory())
            await asyncio.sleep(0.2)
            assert not leaving.done(), "two servers start"
            assert not servers[2].released
            for server in servers[:2]:
                server.may_start.set()
            await leaving
            assert servers[2].released
            await servers[2].die()
            await asyncio.sleep(0.3)
            assert [server.starts for server in servers] == [2, 2, 1], "the trainer has the memory"
            await fleet.resume_memory()
            await until(lambda: all(member.state == "ready" for member in fleet.members))

    run(test)


def test_a_server_that_never_starts_is_tried_for_ever() -> None:
    pauses = [FAST.backoff_s(attempt) for attempt in (0, 1, 2, 5000)]
    assert pauses[0] == FAST.first_backoff_s
    assert pauses == sorted(pauses)
    assert pauses[-1] == FAST.longest_backoff_s


def test_half_of_the_servers_may_begin_and_the_others_join_with_the_newest_weights(folders: list[Path]) -> None:
    async def test() -> None:
        servers, reports = [StandIn() for _ in range(3)], list[str]()
        servers[2].may_start.clear()
        async with fleet_of(*servers, reports=reports, start_quorum=0.5) as fleet:
            assert "the run begins without 1 of 3 servers" in reports
            await fleet.publish(folders[0], 1)
            servers[2].may_start.set()
            await until(lambda: fleet.members[2].state == "ready")
            assert servers[2].label == "1"

    run(test)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_fp8_weights_need_a_server_that_takes_them_and_others_one_that_does_not(quantization: str) -> None:
    async def test() -> None:
        server, blocks = StandIn(), json.dumps({"quantization_config": QUANTIZATION})
        fitting, other = ("{}", blocks) if quantization == "none" else (blocks, "{}")
        server.says = {"json_model_override_args": other}
        with pytest.raises(ServerUnfit, match=f"quantization = {quantization} needs a server with.* --json-model-over"):
            async with fleet_of(server, quantization=quantization):
                pass
        server.says = {"json_model_override_args": fitting}
        async with fleet_of(server, quantization=quantization) as fleet:
            assert fleet.kinds[0].quantized is (quantization == "fp8")

    run(test)


class FullForAMoment(io.StringIO):
    """The batch log, on a disk that is full when the first line comes."""

    written = 0

    def write(self, text: str) -> int:
        self.written += 1
        if self.written == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_line_that_cannot_be_written_leaves_no_server_unwatched() -> None:
    async def test() -> None:
        server, log = StandIn(), FullForAMoment()
        async with fleet_of(server, reports=SimpleNamespace(append=Console(log).aside)) as fleet:
            await server.die()
            await until(lambda: fleet.members[0].restarts == 1 and fleet.members[0].state == "ready")
            await until(lambda: "is back with weight version" in log.getvalue())

    run(test)
