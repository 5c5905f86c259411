"""The log names the response that a quiet fleet owes."""

import asyncio
from dataclasses import replace

from tests.rollout.fleet_kit import FAST, fleet_of, request, run, until
from tests.rollout.standin import StandIn

QUICK = replace(FAST, silence_s=0.15)


def test_a_response_that_a_living_server_has_lost_is_named_and_goes_on_elsewhere() -> None:
    async def test() -> None:
        first, other = StandIn(), StandIn()
        reports: list[str] = []
        async with fleet_of(first, other, reports=reports, timing=QUICK, request_deadline_s=2.0) as fleet:
            first.hangs = other.hangs = True
            answer = asyncio.ensure_future(fleet.generate(request("p7-v0-s3.")))
            await until(lambda: len(reports) >= 2)
            loser = first if first.prompts else other
            assert not (other if loser is first else first).prompts
            words = f"responses owed: 1, the longest p7-v0-s3. by {loser.url}, 0 tokens in"
            assert all("no server has sent anything for" in line and words in line for line in reports)
            assert "rollout.request_deadline_s = 2 s" in reports[0]
            first.hangs = other.hangs = False
            generation = await answer
        assert generation.token_ids.size == 5
        assert len(first.prompts) == len(other.prompts) == 1

    run(test)


def test_nothing_is_said_while_segments_come_or_nothing_is_owed() -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.02)
        server.stream_interval = 1
        reports: list[str] = []
        async with fleet_of(server, reports=reports, timing=QUICK) as fleet:
            await fleet.generate(request(tokens=30))
            await asyncio.sleep(0.5)
        assert reports == []

    run(test)


def test_what_was_passed_on_before_the_silence_is_counted() -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.02)
        server.stream_interval = 4
        reports: list[str] = []
        async with fleet_of(server, reports=reports, timing=QUICK) as fleet:
            answer = asyncio.ensure_future(fleet.generate(request(tokens=30)))
            await until(lambda: server.segments >= 2)
            server.seconds_a_token = 60.0
            await until(lambda: reports)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            said = len(reports)
            await asyncio.sleep(0.8)
        assert "8 tokens in" in reports[0]
        assert len(reports) == said  # what is cancelled is not owed

    run(test)


def test_the_load_is_what_runs_and_what_was_drawn() -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.02)
        server.stream_interval = 4
        async with fleet_of(server, stream_every=4) as fleet:
            assert fleet.load() == (0, 0, 0.0)
            await fleet.generate(request("short", tokens=5))
            assert fleet.load() == (5, 0, 0.0)
            answers = [asyncio.ensure_future(fleet.generate(request(name, tokens=30))) for name in ("long", "other")]
            await until(lambda: fleet.load()[0] >= 5 + 2 * 8)
            tokens, running, longest_s = fleet.load()
            assert tokens <= 5 + 2 * 28, "of what runs, what was streamed"
            assert running == 2
            assert 0.1 < longest_s < 5.0
            await asyncio.gather(*answers)
            assert fleet.load() == (65, 0, 0.0)

    run(test)
