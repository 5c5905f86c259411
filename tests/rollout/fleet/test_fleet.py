"""The fleet over scripted servers: balance, retries, restarts, deadlines, publishes."""

import asyncio
import dataclasses
from collections import Counter

import pytest

from rollout.config import RolloutConfig
from rollout.errors import FleetLost, RolloutError, ServerRefused, ServerStartError, ServerUnavailable, ServerUnfit
from rollout.fleet.fleet import RolloutFleet
from rollout.weights import LOADER
from rollout.wire.client import SglangClient
from tests.rollout.fleet_kit import FAST, check_tokens, fleet_of, request, run, until
from tests.rollout.folders import VOCABULARY
from tests.rollout.standin import StandIn


def test_requests_spread_evenly_and_groups_stay_together() -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.01) for _ in range(2)]
        async with fleet_of(*servers) as fleet:
            asked = [request(f"{g}/{i}", f"g{g}", prompt=(g,)) for g in range(8) for i in range(4)]
            answers = await asyncio.gather(*map(fleet.generate, asked))
        assert [answer.request_id for answer in answers] == [one.request_id for one in asked]
        seen = [Counter(prompt[0] for prompt in server.prompts) for server in servers]
        assert not seen[0].keys() & seen[1].keys()
        assert [sum(counts.values()) for counts in seen] == [16, 16]

    run(test)


def test_no_server_gets_more_than_it_decodes_at_once() -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.005) for _ in range(2)]
        async with fleet_of(*servers, max_running_requests=3) as fleet:
            await asyncio.gather(*(fleet.generate(request(f"r{i}")) for i in range(40)))
        assert [server.most_running for server in servers] == [3, 3]
        assert sum(len(server.prompts) for server in servers) == 40

    run(test)


@pytest.mark.parametrize("status", [500, 503, 429, 200])  # 200: an answer that is no JSON
def test_a_failed_attempt_is_repeated(status: int) -> None:
    async def test() -> None:
        server = StandIn()
        server.fails = lambda number: status if number == 0 else None
        async with fleet_of(server) as fleet:
            check_tokens(await fleet.generate(request()), 1, 5)
        assert len(server.prompts) == 2

    run(test)


def test_a_refused_request_is_not_repeated() -> None:
    async def test() -> None:
        server = StandIn()
        server.fails = lambda number: 400
        async with fleet_of(server) as fleet:
            with pytest.raises(ServerRefused, match="scripted"):
                await fleet.generate(request())
            assert len(server.prompts) == 1
            assert fleet.members[0].state == "ready"
            assert fleet.members[0].in_flight == 0

    run(test)


def test_a_call_on_a_closed_client_fails_as_one_to_a_lost_server() -> None:
    async def test() -> None:
        server = StandIn()
        await server.start()
        client = SglangClient(server.url, request_deadline_s=1.0)
        call = client.health(1.0)  # created before the close, run after it: as when a server is restarted
        await client.close()
        with pytest.raises(ServerUnavailable, match="closed"):
            await call
        await server.close()

    run(test)


def test_attempts_are_bounded_and_the_last_words_are_told() -> None:
    async def test() -> None:
        server = StandIn()
        server.fails = lambda number: 500
        async with fleet_of(server, max_attempts=3) as fleet:
            with pytest.raises(RolloutError, match=r"(?s)request r.*max_attempts = 3.*scripted"):
                await fleet.generate(request())
        assert len(server.prompts) == 3

    run(test)


def test_token_ids_outside_the_vocabulary_reach_no_server() -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            for wrong in (VOCABULARY, -1):
                with pytest.raises(ValueError, match=f"{wrong} is outside the vocabulary"):
                    await fleet.generate(request(prompt=(3, wrong)))
            with pytest.raises(ValueError, match="prompt is empty"):
                await fleet.generate(request(prompt=()))
        assert server.prompts == []

    run(test)


def test_a_killed_server_is_restarted_and_every_request_answered() -> None:
    async def test() -> None:
        servers, reports = [StandIn(seconds_a_token=0.02) for _ in range(2)], list[str]()
        async with fleet_of(*servers, reports=reports) as fleet:
            tasks = [asyncio.ensure_future(fleet.generate(request(f"r{i}", tokens=10))) for i in range(20)]
            await until(lambda: servers[0].running)
            await servers[0].die()
            for answer in await asyncio.gather(*tasks):
                check_tokens(answer, 1, 10)
            await until(lambda: fleet.members[0].state == "ready")
            assert fleet.members[0].restarts == servers[0].starts - 1 == 1
        assert any("its process ended" in line for line in reports)

    run(test)


@pytest.mark.parametrize("what", ["process", "scheduler"])
def test_a_hanging_server_is_noticed_by_probes(what: str) -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server, request_deadline_s=60.0) as fleet:
            server.hangs = True
            task = asyncio.ensure_future(fleet.generate(request()))
            await until(lambda: server.prompts)
            if what == "process":
                server.healthy = False
            else:
                server.scheduler_answers = False  # /health goes on answering, as SGLang's does
            check_tokens(await task, 1, 5)
            assert server.starts == 2

    run(test)


def test_a_slow_answer_is_asked_for_elsewhere_and_given_up_at_the_first() -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers, request_deadline_s=0.3) as fleet:
            servers[0].hangs = servers[1].hangs = True
            task = asyncio.ensure_future(fleet.generate(request()))
            await until(lambda: any(server.prompts for server in servers))
            slow, other = servers if servers[0].prompts else servers[::-1]
            other.hangs = False
            check_tokens(await task, 1, 5)
            await until(lambda: slow.aborted_single)
            assert slow.starts == 1

    run(test)


def test_a_cancelled_request_is_ended_at_its_server() -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.5)
        async with fleet_of(server) as fleet:
            task = asyncio.ensure_future(fleet.generate(request()))
            await until(lambda: server.running)
            (rid,) = server.running
            task.cancel()
            await until(lambda: server.aborted_single == [rid])
            assert fleet.members[0].in_flight == 0

    run(test)


def test_a_cancelled_wait_gives_its_place_to_the_next() -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.02)
        async with fleet_of(server, max_running_requests=1) as fleet:
            tasks = [asyncio.ensure_future(fleet.generate(request(f"r{i}"))) for i in range(3)]
            await until(lambda: server.running)
            tasks[1].cancel()
            check_tokens(await tasks[0], 1, 5)
            check_tokens(await tasks[2], 1, 5)
        assert len(server.prompts) == 2

    run(test)


def test_all_servers_down_for_too_long_ends_the_wait_with_their_last_words() -> None:
    async def test() -> None:
        server, reports = StandIn(), list[str]()
        async with fleet_of(server, reports=reports, fleet_deadline_s=0.6) as fleet:
            server.start_fails = True
            await server.die()
            with pytest.raises(FleetLost, match=r"(?s)fleet_deadline_s = 0.6.*last words of http"):
                await fleet.generate(request())
        assert any("all servers are down" in line and server.url in line for line in reports)

    run(test)


def test_a_server_that_comes_back_within_the_deadline_answers() -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            server.start_fails = True
            await server.die()
            task = asyncio.ensure_future(fleet.generate(request()))
            await until(lambda: server.starts >= 3)
            server.start_fails = False
            check_tokens(await task, 1, 5)

    run(test)


def test_a_start_that_fails_names_the_server_and_ends_the_others() -> None:
    async def test() -> None:
        good, bad = StandIn(), StandIn()
        bad.start_fails = True
        fleet = RolloutFleet(RolloutConfig(), [good, bad], vocab_size=VOCABULARY, report=print, timing=FAST)
        with pytest.raises(ServerStartError, match=r"(?s)1 of 2 servers.*last words of"):
            await fleet.start(1.0)
        assert good.closed
        assert bad.starts == 2

    run(test)


def test_a_server_that_ends_while_it_starts_is_started_again() -> None:
    async def test() -> None:
        server, reports = StandIn(), list[str]()
        server.dies_at_starts = 1
        async with fleet_of(server, reports=reports) as fleet:
            check_tokens(await fleet.generate(request()), 1, 5)
        assert server.starts == 2
        assert any("starting it again" in line for line in reports)

    run(test)


def test_sixty_four_servers_start_without_six_bad_ones_which_are_brought_up_later() -> None:
    async def test() -> None:
        servers, reports = [StandIn() for _ in range(64)], list[str]()
        for bad in servers[7:56:9]:
            bad.start_fails = True
        async with fleet_of(*servers, reports=reports) as fleet:
            assert [status.state == "ready" for status in fleet.members] == [not one.start_fails for one in servers]
            assert "the run begins without 6 of 64 servers" in reports
            asked = [request(f"r{i}") for i in range(128)]
            for answer in await asyncio.gather(*map(fleet.generate, asked)):
                check_tokens(answer, 1, 5)
            await until(lambda: sum("is down: http" in line and "ended while it" in line for line in reports) == 6)
            for server in servers:
                server.start_fails = False
            await until(lambda: all(status.state == "ready" for status in fleet.members))

    run(test)


def test_more_bad_servers_than_one_in_ten_end_the_start() -> None:
    async def test() -> None:
        servers = [StandIn() for _ in range(20)]
        for bad in servers[:3]:
            bad.start_fails = True
        fleet = RolloutFleet(RolloutConfig(), servers, vocab_size=VOCABULARY, report=print, timing=FAST)
        with pytest.raises(ServerStartError, match=r"(?s)3 of 20 servers(.*last words of){3}"):
            await fleet.start(5.0)
        assert all(server.closed for server in servers)

    run(test)


def test_a_server_that_takes_far_longer_than_the_others_comes_later() -> None:
    async def test() -> None:
        servers, reports = [StandIn() for _ in range(10)], list[str]()
        servers[4].may_start.clear()
        async with fleet_of(*servers, reports=reports) as fleet:  # which gives the start 5 s
            assert [status.state for status in fleet.members].count("ready") == 9
            assert "the run begins without 1 of 10 servers" in reports
            servers[4].may_start.set()
            await until(lambda: fleet.members[4].state == "ready")

    run(test)


def test_every_server_may_be_asked_for() -> None:
    async def test() -> None:
        servers = [StandIn() for _ in range(10)]
        servers[4].start_fails = True
        fleet = RolloutFleet(RolloutConfig(start_quorum=1.0), servers, vocab_size=9, report=print, timing=FAST)
        with pytest.raises(ServerStartError, match="1 of 10 servers did not start"):
            await fleet.start(0.5)

    run(test)


@pytest.mark.parametrize("setting", [{"quantization": "fp8"}, {"torchao_config": "int8wo"}])
def test_one_server_whose_weights_could_not_be_verified_ends_the_start(setting: dict[str, str]) -> None:
    async def test() -> None:
        servers = [StandIn() for _ in range(10)]
        servers[9].says = dict(setting)
        fleet = RolloutFleet(RolloutConfig(), servers, vocab_size=9, report=print, timing=FAST)
        with pytest.raises(ServerUnfit, match=f"it runs with {next(iter(setting))}, so that its weights"):
            await fleet.start(5.0)
        assert all(server.closed for server in servers)

    run(test)


def test_changes_alone_need_a_server_that_was_started_with_their_loader() -> None:
    async def test() -> None:
        server = StandIn()
        for told in (None, [], ["another.loader"]):
            server.says = {"custom_weight_loader": told}
            with pytest.raises(
                ServerUnfit, match=r"delta needs .* --custom-weight-loader rollout\.weights\.changes\.load"
            ):
                async with fleet_of(server, weight_sync="delta"):
                    pass
        server.says = {"custom_weight_loader": ["another.loader", LOADER]}
        async with fleet_of(server, weight_sync="delta") as fleet:
            assert fleet.kinds[0].takes_changes

    run(test)


@pytest.mark.parametrize("trainers", [True, False])
@pytest.mark.parametrize("says", [{}, {"enable_fp32_lm_head": False}, {"enable_fp32_lm_head": True}])
@pytest.mark.parametrize("dtype", ["bfloat16", "auto", "float32"])
def test_an_output_layer_in_float32_on_one_side_alone_is_refused(
    trainers: bool, says: dict[str, object], dtype: str
) -> None:
    async def test() -> None:
        server = StandIn()
        server.says = says | {"dtype": dtype}
        fleet = RolloutFleet(RolloutConfig(), [server], vocab_size=9, report=print, timing=FAST, fp32_head=trainers)
        servers = bool(says.get("enable_fp32_lm_head"))
        if dtype == "float32" or servers == trainers:
            await fleet.start(5.0)
            await fleet.close()
            return
        here = "with --enable-fp32-lm-head, but model.fp32_head = false"
        there = "without --enable-fp32-lm-head, but model.fp32_head = true"
        with pytest.raises(ServerUnfit, match=here if servers else there):
            await fleet.start(5.0)

    run(test)


def test_a_server_that_ignores_seeds_is_refused_where_they_are_wanted() -> None:
    async def test() -> None:
        fleet = RolloutFleet(RolloutConfig(deterministic=True), [StandIn()], vocab_size=9, report=print, timing=FAST)
        with pytest.raises(ServerStartError, match="enable-deterministic-inference"):
            await fleet.start(2.0)

    run(test)


@pytest.mark.parametrize("heeds", [True, False])
def test_a_server_that_heeds_seeds_gets_each_response_s_own(heeds: bool) -> None:
    """SGLang gives all requests without a seed the same one then: the responses of a group would be equal. So also
    where the run did not ask for it, as of servers of others and of float32 ones on a GPU."""

    async def test() -> None:
        server = StandIn()
        server.says = {"enable_deterministic_inference": heeds}
        async with fleet_of(server) as fleet:
            for number in range(3):
                await fleet.generate(dataclasses.replace(request(), seed=number))
        assert server.seeds == ([0, 1, 2] if heeds else [None] * 3)

    run(test)


def test_an_unexpected_fault_while_looking_after_a_server_brings_it_back() -> None:
    async def test() -> None:
        server, reports = StandIn(), list[str]()
        async with fleet_of(server, reports=reports) as fleet:
            answers = iter([RuntimeError("planted")])
            alive = server.alive

            def once_broken() -> bool:
                for error in answers:
                    raise error
                return alive()

            server.alive = once_broken  # type: ignore[method-assign]
            await until(lambda: any("is back" in line for line in reports))
            check_tokens(await fleet.generate(request()), 1, 5)
        assert any("looking after it failed (RuntimeError: planted)" in line for line in reports)

    run(test)
