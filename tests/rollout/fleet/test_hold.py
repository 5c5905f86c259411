"""`RolloutFleet.hold`: what is drawn is interrupted and waits with its tokens, whatever happens to the servers then."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from rollout.errors import RolloutError
from rollout.fleet.member import State
from rollout.generation import FinishReason, Generation, GenerationRequest
from tests.rollout.fleet_kit import FAST, check_tokens, fleet_of, request, run, until
from tests.rollout.standin import StandIn


def training(name: str, tokens: int = 30) -> GenerationRequest:
    return replace(request(name, tokens=tokens), holdable=True)


def versions(generation: Generation) -> set[int]:
    return set(generation.weight_versions.tolist())


@pytest.mark.parametrize("streams", [False, True])
def test_the_rest_is_drawn_by_the_weights_of_then_and_an_evaluation_runs_in_between(
    folders: list[Path], streams: bool
) -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.01) for _ in range(2)]
        for server in servers:
            server.stream_interval = 4 if streams else None
        # Two of six have a place; the deadline of a request is shorter than the time in which it is kept back.
        settings = {"max_running_requests": 1, "request_deadline_s": 1.0, "stream_every": 4 if streams else 0}
        async with fleet_of(*servers, **settings) as fleet:
            await fleet.publish(folders[0], 3)
            asked = [asyncio.ensure_future(fleet.generate(training(f"r{number}"))) for number in range(6)]
            await until(lambda: fleet.load()[1] == 2)
            await asyncio.sleep(0.1)
            await fleet.hold()
            assert not any(server.running for server in servers)
            begun = [len(server.prompts) for server in servers]
            late = asyncio.ensure_future(fleet.generate(training("late")))
            await fleet.release_memory()
            await fleet.resume_memory()
            await fleet.publish(folders[1], 4)
            evaluated = await fleet.generate(request("e", tokens=20))
            await asyncio.sleep(1.2)
            assert versions(evaluated) == {4}
            assert sum(len(server.prompts) for server in servers) == sum(begun) + 1, "only the evaluation"
            assert fleet.load()[1] == 0
            fleet.let_go()
            answers = [*(await asyncio.gather(*asked)), await late]
            for answer in answers:
                check_tokens(answer, 1, 30)
            both = [answer for answer in answers if versions(answer) == {3, 4}]
            assert len(both) == 2, "those that had a place"
            assert all(answer.weight_versions[0] == 3 and answer.weight_versions[-1] == 4 for answer in both)
            assert [versions(answer) for answer in answers if answer not in both] == [{4}] * 5

    run(test)


def test_no_place_is_given_and_no_wait_ended_while_a_request_is_kept_back() -> None:
    """All servers die, for longer than a request waits for one."""

    async def test() -> None:
        server = StandIn(seconds_a_token=0.01)
        async with fleet_of(server, fleet_deadline_s=0.3, timing=FAST) as fleet:
            asked = asyncio.ensure_future(fleet.generate(training("r")))
            await until(lambda: server.running)
            await asyncio.sleep(0.05)
            await fleet.hold()
            server.start_fails = True
            await server.die()
            with pytest.raises(RolloutError, match="fleet_deadline_s"):
                await fleet.generate(request("e"))
            assert not asked.done()
            server.start_fails = False
            await until(lambda: fleet.members[0].state == "ready")
            fleet.let_go()
            check_tokens(await asked, 1, 30)

    run(test)


def test_a_server_that_ends_nothing_is_restarted_and_its_response_goes_on() -> None:
    class Deaf(StandIn):
        async def _abort(self, request):
            return await super()._abort(request) if self.starts > 1 else await asyncio.sleep(60)

    async def test() -> None:
        server = Deaf(seconds_a_token=0.01)
        async with fleet_of(server, timing=replace(FAST, control_deadline_s=0.2)) as fleet:
            asked = asyncio.ensure_future(fleet.generate(training("r", tokens=300)))
            await until(lambda: server.running)
            await fleet.hold()
            assert not any(member.in_flight for member in fleet.members)
            await until(lambda: fleet.members[0].state == "ready")
            assert server.starts == 2
            fleet.let_go()
            check_tokens(await asked, 1, 300)

    run(test)


def test_many_interruptions_are_no_failures_of_the_servers(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.002) for _ in range(2)]
        async with fleet_of(*servers, max_attempts=1, max_running_requests=4) as fleet:
            asked = [asyncio.ensure_future(fleet.generate(training(f"r{number}", 60))) for number in range(24)]
            for version in range(1, 9):
                await asyncio.sleep(0.03)
                await fleet.hold()
                await fleet.publish(folders[version % 2], version)
                fleet.let_go()
            for answer in await asyncio.gather(*asked):
                check_tokens(answer, 1, 60)
                assert (np.diff(answer.weight_versions) >= 0).all()

    run(test)


def test_the_end_of_a_run_ends_what_is_kept_back() -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.01)
        async with fleet_of(server) as fleet:
            first, other = (asyncio.ensure_future(fleet.generate(training(name))) for name in ("r", "s"))
            await until(lambda: server.running)
            await fleet.hold()
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()
            await fleet.release_memory()
            await fleet.resume_memory()
        with pytest.raises(RolloutError, match="closed"):
            await other
        assert len(asyncio.all_tasks()) == 1, "no task is left behind"

    run(test)


@pytest.mark.parametrize("held", [False, True])
def test_what_was_drawn_until_now_is_told_and_another_fleet_goes_on_from_it(folders: list[Path], held: bool) -> None:
    """As of a run that is killed, and one that is resumed with newer weights: no token that was told is drawn again."""

    async def test() -> None:
        first, other = (StandIn(seconds_a_token=0.01) for _ in range(2))
        first.stream_interval = other.stream_interval = 4
        async with fleet_of(first, stream_every=4) as fleet:
            await fleet.publish(folders[0], 3)
            assert fleet.so_far("r") is None
            asked = asyncio.ensure_future(fleet.generate(training("r", tokens=60)))
            await until(lambda: first.segments >= 2)
            if held:
                await fleet.hold()
            drawn = fleet.so_far("r")
            assert drawn is not None
            assert drawn.finish_reason is FinishReason.ABORT
            check_tokens(drawn, 1, drawn.token_ids.size)
            assert drawn.token_ids.size >= 8
            asked.cancel()
            await asyncio.wait([asked])
            assert fleet.so_far("r") is None
        async with fleet_of(other, stream_every=4) as fleet:
            await fleet.publish(folders[1], 5)
            asked = asyncio.ensure_future(fleet.generate(replace(training("r", tokens=60), begun=drawn)))
            await until(lambda: other.segments >= 2)
            now = fleet.so_far("r")
            whole = await asked
            assert now is not None
            for one in (now, whole):
                check_tokens(one, 1, one.token_ids.size)
                before = drawn.token_ids.size
                assert set(one.weight_versions[:before]) == {3}
                assert set(one.weight_versions[before:]) == {5}
            assert len(other.prompts[0]) == 1 + drawn.token_ids.size
            assert whole.token_ids.size == 60
            # One that was complete is not asked for again, whatever ended it.
            again = await fleet.generate(
                replace(training("r", tokens=99), begun=replace(whole, finish_reason=FinishReason.STOP))
            )
            assert again.finish_reason is FinishReason.STOP
            check_tokens(replace(again, weight_versions=whole.weight_versions), 1, 60)
            assert len(other.prompts) == 1

    run(test)


class AbortsOnTheWay(StandIn):
    """SGLang's answer to what is aborted before its scheduler has it: 499."""

    on_the_way = 3

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.on_the_way:
            return await super()._generate(request)
        self.on_the_way -= 1
        rid = (await request.json())["rid"]
        self.running[rid] = aborted = asyncio.Event()
        await aborted.wait()
        del self.running[rid]
        return web.json_response({"error": {"message": "aborted"}}, status=499)


def test_what_is_interrupted_on_its_way_to_a_server_is_no_failure_of_it(folders: list[Path]) -> None:
    async def test() -> None:
        server = AbortsOnTheWay()
        async with fleet_of(server, max_attempts=2) as fleet:
            await fleet.publish(folders[0], 3)
            asked = asyncio.ensure_future(fleet.generate(training("r")))
            for left in (2, 1, 0):
                await until(lambda left=left: server.running and server.on_the_way == left)
                await fleet.hold()
                assert [member.state for member in fleet.members] == [State.READY]
                fleet.let_go()
            check_tokens(await asked, 1, 30)

    run(test)
