"""The fleet over scripted servers: balance, retries, restarts, deadlines, publishes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.config import RolloutConfig
from rollout.errors import FleetLost, RolloutError, ServerRefused, ServerStartError, WeightMismatch
from rollout.fleet import RolloutFleet
from rollout.messages import FinishReason, Generation, GenerationRequest, SamplingParams
from rollout.timing import Timing
from tests.rollout.folders import VOCABULARY, save_model
from tests.rollout.standin import StandIn

FAST = Timing(
    probe_interval_s=0.05,
    probe_deadline_s=0.2,
    failed_probes=2,
    scheduler_interval_s=0.1,
    scheduler_deadline_s=0.3,
    control_deadline_s=2.0,
    load_deadline_s=10.0,
    first_backoff_s=0.05,
    longest_backoff_s=0.1,
    report_interval_s=0.2,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Weights of versions 1, 2, 3."""
    root = tmp_path_factory.mktemp("weights")
    for seed in (1, 2, 3):
        save_model(root / str(seed), "qwen3", seed, num_hidden_layers=1)
    return [root / str(seed) for seed in (1, 2, 3)]


def request(
    name: str = "r", group: str | None = None, tokens: int = 5, prompt: Sequence[int] = (7,)
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        group_id=group or name,
        prompt_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(max_new_tokens=tokens),
        seed=0,
    )


@asynccontextmanager
async def fleet_of(
    *engines: StandIn, reports: list[str] | None = None, timing: Timing = FAST, **settings: Any
) -> AsyncIterator[RolloutFleet]:
    config = RolloutConfig(**({"request_deadline_s": 5.0, "fleet_deadline_s": 3.0} | settings))
    lines = [] if reports is None else reports
    fleet = RolloutFleet(config, engines, vocab_size=VOCABULARY, report=lines.append, timing=timing)
    await fleet.start(5.0)
    try:
        yield fleet
    finally:
        await fleet.close()


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def check_tokens(generation: Generation, prompt: int, tokens: int) -> None:
    """Every token was drawn at its place, and by the version it says it was."""
    assert generation.token_ids.dtype == generation.weight_versions.dtype == np.int32
    assert generation.log_probs.dtype == np.float32
    assert generation.token_ids.size == generation.log_probs.size == generation.weight_versions.size == tokens
    positions = (prompt + np.arange(tokens)) % 10
    np.testing.assert_array_equal(generation.token_ids, 10 * generation.weight_versions + positions)
    np.testing.assert_array_equal(generation.log_probs, -generation.weight_versions.astype(np.float32))


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
            assert fleet.status()[0].state == "ready"
            assert fleet.status()[0].in_flight == 0

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
            with pytest.raises(ValueError, match=f"{VOCABULARY} is outside the vocabulary"):
                await fleet.generate(request(prompt=(3, VOCABULARY)))
            with pytest.raises(ValueError, match="score"):
                await fleet.score(np.array([3], np.int32), np.array([VOCABULARY], np.int32))
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
            await until(lambda: fleet.status()[0].state == "ready")
            assert fleet.status()[0].restarts == servers[0].starts - 1 == 1
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
            assert fleet.status()[0].in_flight == 0

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

    run(test)


def test_a_server_that_ignores_seeds_is_refused_where_they_are_wanted() -> None:
    async def test() -> None:
        fleet = RolloutFleet(RolloutConfig(deterministic=True), [StandIn()], vocab_size=9, report=print, timing=FAST)
        with pytest.raises(ServerStartError, match="enable-deterministic-inference"):
            await fleet.start(2.0)

    run(test)


def test_publish_interrupts_and_every_token_has_its_version(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.02) for _ in range(2)]
        async with fleet_of(*servers, max_running_requests=4) as fleet:
            await fleet.publish(folders[0], 1)
            tasks = [asyncio.ensure_future(fleet.generate(request(f"r{i}", tokens=30))) for i in range(12)]
            await asyncio.sleep(0.2)
            report = await fleet.publish(folders[1], 2)
            assert (report.weight_version, report.interrupted, report.down) == (2, 8, ())
            assert [server.tensors for server in report.servers] == [11, 11]
            answers = await asyncio.gather(*tasks)
        for answer in answers:
            check_tokens(answer, 1, 30)
            assert answer.finish_reason is FinishReason.LENGTH
            assert (np.diff(answer.weight_versions) >= 0).all()
        assert sum(set(answer.weight_versions) == {1, 2} for answer in answers) == 8
        for server in servers:
            assert server.calls[:5] == ["pause", "update 1", "flush", "resume", "generate 1"]
            begin = server.calls.index("pause", 1)
            assert server.calls[begin : begin + 4] == ["pause", "update 2", "flush", "resume"]
            assert {call for call in server.calls[begin + 4 :]} == {"generate 2"}

    run(test)


def test_a_restarted_server_gets_the_newest_weights_before_it_serves(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            await fleet.publish(folders[0], 1)
            await fleet.publish(folders[2], 7)
            server.calls.clear()
            await server.die()
            generation = await fleet.generate(request())
            assert set(generation.weight_versions) == {7}
            assert server.calls == ["pause", "update 7", "flush", "resume", "generate 7"]
            assert server.loaded == folders[2]

    run(test)


def test_a_wrong_tensor_stops_the_publish_and_the_server(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        server.corrupt = "model.layers.0.mlp.down_proj.weight"
        async with fleet_of(server, fleet_deadline_s=0.5) as fleet:
            with pytest.raises(WeightMismatch, match=r"1 tensors differ.*mlp.down_proj.weight has 0000000000000000"):
                await fleet.publish(folders[0], 1)
            with pytest.raises(FleetLost, match=r"mlp\.down_proj"):
                await fleet.generate(request())
        assert server.prompts == []

    run(test)


def test_a_server_that_dies_in_a_publish_gets_the_weights_later(folders: list[Path]) -> None:
    async def test() -> None:
        servers = [StandIn(), StandIn()]
        async with fleet_of(*servers) as fleet:
            servers[0].die_on_update = True
            report = await fleet.publish(folders[0], 1)
            assert len(report.servers) == len(report.down) == 1
            await until(lambda: fleet.status()[0].state == "ready")
            assert [status.weight_version for status in fleet.status()] == [1, 1]
            assert servers[0].loaded == folders[0]
            # The only server may die too: publish waits for its return.
            servers[1].start_fails = True
            await servers[1].die()
            servers[0].die_on_update = True
            await fleet.publish(folders[1], 2)
            assert set((await fleet.generate(request())).weight_versions) == {2}

    run(test)


def test_a_folder_that_the_server_cannot_load_is_an_error(folders: list[Path], tmp_path: Path) -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            with pytest.raises(FileNotFoundError, match="safetensors"):
                await fleet.publish(tmp_path, 1)
            server.refuse_updates = True
            with pytest.raises(ServerRefused, match="no such folder"):
                await fleet.publish(folders[0], 1)

    run(test)


def test_a_server_restarted_behind_our_back_is_noticed_by_its_weights(folders: list[Path]) -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            await fleet.publish(folders[0], 1)
            server.label = "0"
            assert set((await fleet.generate(request())).weight_versions) == {1}
            assert server.starts == 2

    run(test)


def test_closing_ends_waits_and_servers() -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=1.0)
        async with fleet_of(server, max_running_requests=1) as fleet:
            tasks = [asyncio.ensure_future(fleet.generate(request(f"r{i}"))) for i in range(2)]
            await until(lambda: server.running)
            await fleet.close()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [RolloutError, RolloutError]
            with pytest.raises(RolloutError, match="closed"):
                await fleet.generate(request())
        assert server.closed

    run(test)
