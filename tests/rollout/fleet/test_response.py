"""Answers that a server should not give, and what the fleet makes of them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollout.errors import RolloutError, ServerRefused
from rollout.generation import FinishReason, GenerationRequest, SamplingParams
from tests.rollout.fleet_kit import check_tokens, fleet_of, request, run, until
from tests.rollout.folders import VOCABULARY
from tests.rollout.standin import StandIn

END = 2


def answer(ids: list[int], kind: str = "stop", log_probs: list[float] | None = None, **more: object) -> dict[str, Any]:
    drawn = [[value, one, None] for value, one in zip(log_probs or [-0.5] * len(ids), ids, strict=True)]
    return {"output_ids": ids, "meta_info": {"finish_reason": {"type": kind} | more, "output_token_logprobs": drawn}}


class Canned(StandIn):
    """Gives the answers of a list, then those of a stand-in."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        super().__init__()
        self.answers = list(answers)

    async def _generate(self, request: web.Request) -> web.Response:
        if not self.answers:
            return await super()._generate(request)
        self.prompts.append((await request.json())["input_ids"])
        return web.json_response(self.answers.pop(0))


def asked(tokens: int = 5) -> GenerationRequest:
    return replace(request(), sampling=SamplingParams(max_new_tokens=tokens, stop_token_ids=(END,)))


@pytest.mark.parametrize(
    "wrong",
    [
        answer([VOCABULARY, END]),
        answer([-1, END]),
        answer([2**40, END]),
        answer([1, 1, 1, 1, 1, END]),  # 5 were asked for
        answer([]),
        answer([], "length", length=5),
        answer([3, END], log_probs=[-0.5, 5.0]),
        answer([3, END], log_probs=[-0.5, -1e300]),
        answer([3, END], matched="NaN happened"),  # SGLang's word for logits that are not numbers
        answer([VOCABULARY], "abort"),  # its continuation would end the next server
    ],
    ids=lambda wrong: str(wrong["meta_info"]["output_token_logprobs"])[:30],
)
def test_an_answer_that_cannot_be_is_asked_for_again(wrong: dict[str, Any]) -> None:
    async def test() -> None:
        server = Canned(wrong)
        async with fleet_of(server) as fleet:
            check_tokens(await fleet.generate(asked()), 1, 5)
        assert server.prompts == [[7], [7]]

    run(test)


def test_an_aborted_response_that_had_ended_does_not_go_on() -> None:
    """A server that aborts between two tokens does not look whether the last one ended the response."""

    async def test() -> None:
        server = Canned(answer([3, END], "abort", message="Abort"))
        async with fleet_of(server) as fleet:
            generation = await fleet.generate(asked())
        assert generation.token_ids.tolist() == [3, END]
        assert generation.finish_reason is FinishReason.STOP
        assert len(server.prompts) == 1

    run(test)


@pytest.mark.parametrize("last", [4, END])
def test_an_abort_at_the_very_limit_is_a_truncation(last: int) -> None:
    async def test() -> None:
        server = Canned(answer([3, 3], "abort"), answer([], "abort"), answer([3, 3, last], "abort"))
        async with fleet_of(server) as fleet:
            generation = await fleet.generate(asked())
        assert generation.token_ids.tolist() == [3, 3, 3, 3, last]
        assert generation.finish_reason is FinishReason.LENGTH
        assert server.prompts == [[7], [7, 3, 3], [7, 3, 3]]

    run(test)


def test_a_server_without_room_for_the_longest_response_is_named() -> None:
    async def test() -> None:
        server = Canned(answer([3] * 40, "length", length=40), answer([3] * 48, "length", length=48))
        async with fleet_of(server) as fleet:
            with pytest.raises(ServerRefused, match=r"40 tokens of 50: its context or KV cache.*raise model\.context"):
                await fleet.generate(asked(50))
            cut = await fleet.generate(asked(50))  # what SGLang keeps back of its context
        assert (cut.token_ids.size, cut.finish_reason) == (48, FinishReason.LENGTH)

    run(test)


def test_a_server_that_fails_for_a_moment_does_not_use_up_the_attempts() -> None:
    async def test() -> None:
        server, clock = StandIn(), asyncio.get_running_loop().time
        began = clock()
        server.fails = lambda number: 503 if clock() - began < 0.15 else None
        async with fleet_of(server, max_attempts=6) as fleet:
            check_tokens(await fleet.generate(request()), 1, 5)

    run(test)


def test_a_slow_server_keeps_nobody_waiting_and_its_tokens_are_not_lost() -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.1) for _ in range(2)]  # 1.2 s for the response
        async with fleet_of(*servers, request_deadline_s=0.45, max_attempts=10) as fleet:
            check_tokens(await fleet.generate(request(tokens=12)), 1, 12)
        asked = [len(prompt) for server in servers for prompt in server.prompts]
        assert min(asked) == 1
        assert len(set(asked)) == len(asked) >= 3, "each call goes on from the tokens of the one before"
        assert all(server.prompts for server in servers), "and at another server"
        assert sum(server.starts for server in servers) == 2

    run(test)


def test_a_response_that_a_slow_server_cut_is_drawn_again_where_the_same_seed_gives_the_same_run() -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.1), StandIn(seconds_a_token=0.001)]
        for server in servers:
            server.says = {"enable_deterministic_inference": True}
        async with fleet_of(*servers, request_deadline_s=0.45, deterministic=True) as fleet:
            answers = [await fleet.generate(request(f"r{i}", tokens=12)) for i in range(3)]
        for generation in answers:
            check_tokens(generation, 1, 12)
        assert servers[0].prompts, "none was cut"
        assert {tuple(prompt) for server in servers for prompt in server.prompts} == {(7,)}, "from its first token"

    run(test)


def test_the_next_attempt_is_elsewhere_even_where_a_group_is_at_home() -> None:
    """Places are scarce, so that the server that failed is probed and free again before the other one is."""

    async def test() -> None:
        bad, good = StandIn(), StandIn(seconds_a_token=0.05)
        bad.fails = lambda number: 500
        async with fleet_of(bad, good, max_running_requests=1, max_attempts=3) as fleet:
            busy = [asyncio.ensure_future(fleet.generate(request(f"b{i}", "b", prompt=(9,)))) for i in range(2)]
            await until(lambda: good.running)
            check_tokens(await fleet.generate(request("r", "g")), 1, 5)
            for generation in await asyncio.gather(*busy):
                check_tokens(generation, 1, 5)
        assert len(bad.prompts) <= 2, "no request is tried twice at the same server while there is another"

    run(test)


def test_the_only_server_left_gets_what_it_failed_before() -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers) as fleet:
            servers[1].start_fails = True
            await servers[1].die()
            await until(lambda: fleet.members[1].state == "down")
            servers[0].fails = lambda number: 500 if number == 0 else None
            check_tokens(await fleet.generate(request()), 1, 5)

    run(test)


def test_who_avoids_a_server_for_another_is_served_when_the_other_one_is_lost() -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn(seconds_a_token=5.0)]
        async with fleet_of(*servers, max_running_requests=1) as fleet:
            servers[0].fails = lambda number: 500 if number == 0 else None
            busy = asyncio.ensure_future(fleet.generate(request("b")))
            await until(lambda: servers[1].running or servers[0].prompts)
            one = asyncio.ensure_future(fleet.generate(request("r")))
            await until(lambda: servers[0].prompts and servers[1].running)
            servers[1].start_fails = True
            await servers[1].die()
            for generation in await asyncio.gather(busy, one):
                check_tokens(generation, 1, 5)

    run(test)


class Loading(StandIn):
    """Its scheduler answers nobody while it loads, as SGLang's."""

    async def _update(self, request: web.Request) -> web.Response:
        self.scheduler_answers = False
        try:
            return await super()._update(request)
        finally:
            self.scheduler_answers = True


def test_a_server_that_loads_for_long_is_not_taken_for_a_hanging_one(folders: list[Path]) -> None:
    async def test() -> None:
        server, reports = Loading(), list[str]()
        async with fleet_of(server, reports=reports) as fleet:
            server.slow_updates = 1.0  # its scheduler's deadline is 0.3 s, that of a load 10 s
            assert len((await fleet.publish(folders[0], 1)).servers) == 1
            assert server.starts == 1
            await server.die()  # and again on its return
            check_tokens(await fleet.generate(request()), 1, 5)
            assert server.starts == 2
        assert sum("is down" in line for line in reports) == 1

    run(test)


def test_a_request_that_nobody_waits_for_does_not_end_the_run_in_a_publish(folders: list[Path]) -> None:
    """The server is restarted instead, and gets the weights then."""

    class Busy(StandIn):
        async def _flush(self, request: web.Request) -> web.Response:
            return await super()._flush(request) if self.starts > 1 else web.Response(status=400, text="not idle")

    async def test() -> None:
        server = Busy()
        async with fleet_of(server) as fleet:
            await fleet.publish(folders[0], 1)
            assert set((await fleet.generate(request())).weight_versions) == {1}
            assert server.starts == 2

    run(test)


def test_a_server_of_others_that_a_killed_run_left_paused_and_busy_gets_the_weights(folders: list[Path]) -> None:
    class Foreign(StandIn):
        """As SGLang comes: /health draws a token, so it does not answer while the server is paused."""

        async def start(self) -> None:
            await super().start()
            self.ours, self.paused = False, True
            self.running["of another run"] = asyncio.Event()

        async def restart(self, weights: tuple[Path, str] | None = None) -> None:
            raise AssertionError("nobody here can restart it")

        async def _health(self, request: web.Request) -> web.Response:
            if self.paused:
                await asyncio.sleep(60)
            return web.Response()

        async def _abort(self, request: web.Request) -> web.Response:
            if not self.paused:
                self.running.pop("of another run", None)
            return await super()._abort(request)

    async def test() -> None:
        server, reports = Foreign(), list[str]()
        async with fleet_of(server, reports=reports) as fleet:
            server.slow_updates = 0.5  # longer than two probes
            report = await fleet.publish(folders[0], 1)
            assert (len(report.servers), reports) == (1, [])
            check_tokens(await fleet.generate(request()), 1, 5)

    run(test)


def test_a_key_that_is_refused_is_said_at_once() -> None:
    class Locked(StandIn):
        def __init__(self, ours: bool) -> None:
            super().__init__()
            self.ours = ours

        async def _info(self, request: web.Request) -> web.Response:
            return web.json_response({"error": "Unauthorized"}, status=401)

    async def test() -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(RolloutError, match=r"(?s)401: .*Unauthorized.*rollout\.api_key_file"):
            async with fleet_of(Locked(ours=False)):
                pass
        assert asyncio.get_running_loop().time() - began < 4, "the fleet had 5 s to start"
        with pytest.raises(RolloutError, match="another program listens there"):
            async with fleet_of(Locked(ours=True)):
                pass

    run(test)


def test_servers_that_die_together_in_a_publish_all_come_back_with_its_weights(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.01) for _ in range(4)]
        async with fleet_of(*servers) as fleet:
            await fleet.publish(folders[0], 1)
            tasks = [asyncio.ensure_future(fleet.generate(request(f"r{i}", tokens=40))) for i in range(8)]
            await until(lambda: all(server.running for server in servers))
            servers[0].die_on_update = servers[1].die_on_update = True
            servers[2].slow_updates = 0.2
            report = await fleet.publish(folders[1], 2)
            assert len(report.servers) == 2
            for generation in await asyncio.gather(*tasks):
                check_tokens(generation, 1, 40)
                assert set(np.unique(generation.weight_versions)) <= {1, 2}
            await until(lambda: all(seen.state == "ready" for seen in fleet.members))
            assert {seen.weight_version for seen in fleet.members} == {2}

    run(test)
