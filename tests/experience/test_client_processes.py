"""Client processes: real ones, in a Ray of the test's own, with stand-in servers and an environment in its workers."""

import asyncio
import json
import os
from collections import Counter

import numpy as np
import psutil
import pytest

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.cluster import clients as clients_module
from megatron_dapo.cluster.ray_cluster import Cluster
from megatron_dapo.config.algorithm_config import AlgorithmConfig, DynamicSamplingConfig
from megatron_dapo.coordinator.sampler import DynamicSampler
from megatron_dapo.experience.episodes import drawn_turns
from megatron_dapo.experience.generator import Unjudged
from megatron_dapo.experience.groups import SamplerState
from megatron_dapo.storage.ledger import Ledger
from rollout.errors import RolloutError
from rollout.generation import FinishReason
from tests.experience.clients_kit import ENVIRONMENT, GROUP, TURNS, check_tokens, place
from tests.rollout.fleet_kit import until
from tests.rollout.folders import save_model

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def local_ray():
    cluster = Cluster(processes=2, device="cpu")
    yield
    cluster.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Folders of versions 1 and 2."""
    root = tmp_path_factory.mktemp("weights")
    for seed in (1, 2):
        save_model(root / str(seed), "qwen3", seed, num_hidden_layers=1)
    return [root / str(seed) for seed in (1, 2)]


@pytest.fixture
def talk(tmp_path, monkeypatch):
    """A folder for the environment, which processes find in the working directory of this one."""
    (tmp_path / "own_talk.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(test):
    asyncio.run(asyncio.wait_for(test(), 120))


def asked(folder):
    file = folder / "asked"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def said(group):
    """What a group is, without the moments at which it was drawn."""
    return [
        (
            *(one.generation.token_ids.tolist(), one.generation.log_probs.tolist(), one.generation.given),
            *(one.generation.weight_versions.tolist(), one.earlier, one.text, one.verdict.extracted),
            *(one.reward_raw, one.accuracy, one.by_environment, one.generation.finish_reason),
        )
        for one in group.responses
    ]


def drawn(engines):
    return sum(len(engine.prompts) for engine in engines)


def test_processes_play_the_same_episodes_as_the_coordinator(local_ray, text, talk):
    found = {}

    async def play(processes):
        async with place(text, talk, processes=processes) as there:
            groups = await asyncio.gather(*(there.generator.group(position, 0) for position in range(3)))
            for group in groups:
                check_tokens(group)
            parts = Counter((part.request_id, part.tokens, part.prompt_tokens) for part in there.parts)
            loads = sum(group.tokens for group in groups), *there.fleet.load()[:2]
            found[processes] = [said(group) for group in groups], parts, loads, len(asked(talk))
            (talk / "asked").unlink()

    for processes in (0, 2):
        run(lambda processes=processes: play(processes))
    assert found[2] == found[0]
    _, _, (tokens, counted, running), calls = found[2]
    assert (counted, running, calls) == (tokens, 0, 3 * GROUP * TURNS)


@pytest.mark.parametrize(
    "on_publish",
    ["restart", pytest.param("recompute", marks=pytest.mark.slow), pytest.param("keep", marks=pytest.mark.slow)],
)
def test_a_publish_waits_for_no_environment_and_asks_none_twice(local_ray, text, talk, weights, on_publish):
    async def test():
        async with place(text, talk, processes=1, on_publish=on_publish) as there:
            await there.fleet.publish(weights[0], 1)
            (talk / "closed").touch()
            group = asyncio.ensure_future(there.generator.group(0, 1))
            await until(lambda: len(asked(talk)) == GROUP)
            await asyncio.wait_for(there.fleet.publish(weights[1], 2), 10)
            await there.clients.refresh()
            left = there.generator.unfinished(0, 1)
            assert all(
                each.generation.weight_versions.tolist() == [1] * each.generation.drawn for each in left.responses
            )
            assert all(each.generation.drawn > 0 for each in left.responses)
            assert not group.done()
            (talk / "closed").unlink()
            finished = await group
            check_tokens(finished)
            for one in finished.responses:
                by_turn = np.split(
                    one.generation.weight_versions, np.cumsum(list(map(len, drawn_turns(one.generation))))[:-1]
                )
                assert [set(versions.tolist()) for versions in by_turn] == [{1}, {2}, {2}]
            assert Counter(turn for turn, *_ in asked(talk)) == dict.fromkeys((1, 2, 3), GROUP)

    run(test)


@pytest.mark.slow
@pytest.mark.parametrize(
    "on_publish",
    ["restart", "recompute", "keep"],
)
def test_what_a_server_draws_is_interrupted_and_goes_on_with_the_new_weights(
    local_ray, text, talk, weights, on_publish
):
    async def test():
        async with place(text, talk, processes=1, seconds=0.1, on_publish=on_publish, servers=1) as there:
            (engine,) = there.engines
            await there.fleet.publish(weights[0], 1)
            group = asyncio.ensure_future(there.generator.group(0, 1))
            await until(lambda: len(engine.running) == GROUP)
            await asyncio.sleep(0.25)
            await there.fleet.publish(weights[1], 2)  # the stand-in checks that nothing is drawn meanwhile
            finished = await group
            check_tokens(finished)
            for one in finished.responses:
                first = one.generation.weight_versions[: len(drawn_turns(one.generation)[0])]
                assert set(first.tolist()) == {1, 2}
                assert set(one.generation.weight_versions[len(first) :].tolist()) == {2}
            assert drawn(there.engines) == GROUP * (TURNS + 1)
            if on_publish == "keep":  # an interrupted turn finds its own keys and values, later ones those of now
                assert engine.cache_keys == ["1"] * 2 * GROUP + ["2"] * 2 * GROUP

    run(test)


@pytest.mark.slow
def test_nothing_is_drawn_while_held_and_all_goes_on_afterwards(local_ray, text, talk):
    async def test():
        async with place(text, talk, processes=2, seconds=0.05) as there:
            groups = [asyncio.ensure_future(there.generator.group(position, 0)) for position in range(4)]
            await until(lambda: sum(len(engine.running) for engine in there.engines) > 8)
            await there.fleet.hold()
            assert not any(engine.running for engine in there.engines)
            before = drawn(there.engines)
            await there.clients.refresh()
            left = there.generator.unfinished(0, 0)
            assert any(each.generation.drawn for each in left.responses), "of plays without a server too"
            await there.fleet.release_memory()
            await asyncio.sleep(0.3)
            assert drawn(there.engines) == before
            await there.fleet.resume_memory()
            there.fleet.let_go()
            for group in await asyncio.gather(*groups):
                check_tokens(group)
            assert len(asked(talk)) == 4 * GROUP * TURNS

    run(test)


async def second_turns(there, *positions):
    """Until all plays of these groups are known to be in one. Returns how many tokens are known of them."""
    while True:
        await there.clients.refresh()
        groups = [there.generator.unfinished(position, 0) for position in positions]
        known = [one.generation for group in groups if group is not None for one in group.responses]
        if len(known) == GROUP * len(positions) and all(each.given for each in known):
            return sum(each.drawn for each in known)
        await asyncio.sleep(0.02)


async def process_of(clients):
    (host,) = clients._hosts
    return psutil.Process(await host.__ray_call__.remote(lambda self: os.getpid()))


@pytest.mark.slow
@pytest.mark.parametrize("on_publish", ["restart", "recompute"])
def test_a_process_that_hangs_ends_no_server_in_a_publish(local_ray, text, talk, weights, monkeypatch, on_publish):
    monkeypatch.setattr(clients_module, "STOP_S", 0.5)

    async def test():
        async with place(text, talk, processes=1, seconds=0.1, on_publish=on_publish) as there:
            process = await process_of(there.clients)
            await there.fleet.publish(weights[0], 1)
            groups = [asyncio.ensure_future(there.generator.group(position, 1)) for position in range(4)]
            await until(lambda: all(member.drawing for member in there.fleet.members))
            process.suspend()
            report = await there.fleet.publish(weights[1], 2)
            assert len(report.servers) == 2
            assert [member.restarts for member in there.fleet.members] == [0, 0]
            assert there.reports == ["client process 0: no answer within 0.5 s; starting another one"]
            for group in await asyncio.gather(*groups):
                check_tokens(group)

    run(test)


def test_a_process_that_starts_is_left_alone_by_a_publish(local_ray, text, talk, monkeypatch):
    """It has no play yet, and its imports alone may take longer than an answer may."""
    monkeypatch.setattr(clients_module, "PING_S", 0.2)
    monkeypatch.setattr(clients_module, "STOP_S", 0.05)

    async def test():
        async with place(text, talk, processes=1, seconds=0.1) as there:
            process = await process_of(there.clients)
            group = asyncio.ensure_future(there.generator.group(0, 0))
            await second_turns(there, 0)
            process.kill()
            await until(lambda: there.reports, 40.0)
            there.clients._stop(there.fleet.members[0].url, lost=False)  # as a publish does while groups are drawn
            check_tokens(await group)
            assert len(there.reports) == 1

    run(test)


@pytest.mark.parametrize("end", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_lost_process_costs_what_was_drawn_since_the_last_look(local_ray, text, talk, monkeypatch, end):
    monkeypatch.setattr(clients_module, "PING_S", 0.2)
    monkeypatch.setattr(clients_module, "SILENT_S", 25.0)

    async def test():
        async with place(text, talk, processes=1, seconds=0.1) as there:
            process = await process_of(there.clients)
            group = asyncio.ensure_future(there.generator.group(0, 0))
            await second_turns(there, 0)
            await asyncio.sleep(0.25)
            await there.clients.refresh()
            known = [each.generation for each in there.generator.unfinished(0, 0).responses]
            assert all(each.given for each in known)
            assert any(each.drawn > len(drawn_turns(each)[0]) for each in known), "the turn under way too"
            before = drawn(there.engines)
            process.kill() if end == "killed" else process.suspend()
            await until(lambda: there.reports, 40.0)
            check_tokens(await group)
            again = [prompt for engine in there.engines for prompt in engine.prompts][before:]
            missing = [TURNS - len(each.given) - (each.finish_reason is FinishReason.STOP) for each in known]
            assert drawn(there.engines) == before + sum(missing)
            least = group.result().prompt_ids.size + min(each.token_ids.size for each in known)
            assert min(map(len, again)) >= least, "nothing that was known is drawn again"
            assert "client process 0: " in there.reports[0]
            assert "; starting another one" in there.reports[0]
            assert await process_of(there.clients) != process

    run(test)


@pytest.mark.slow
def test_a_run_that_is_stopped_keeps_what_processes_have_drawn_and_goes_on_from_there(local_ray, text, talk):
    sampling = DynamicSamplingConfig(filter="off")
    sizes = {"prompts_per_step": 2, "group_size": GROUP, "mini_batch_responses": GROUP}
    algorithm = AlgorithmConfig(dynamic_sampling=sampling, **sizes)

    def sampler_of(there, ledger, state):
        there.generator.restore(state.unfinished)
        keeping = {"unfinished": there.generator.unfinished, "refresh": there.clients.refresh}
        return DynamicSampler(algorithm, there.generator.group, ledger, state, **keeping)

    async def test():
        ledger, start = Ledger(talk / "ledger.jsonl"), PassRate.start(0.5)
        async with place(text, talk, processes=2, seconds=0.1) as there:
            sampler = sampler_of(there, ledger, SamplerState(cursor=0, pass_rate=start, carried=()))
            filling = asyncio.ensure_future(sampler.fill(1, 0))
            before = await second_turns(there, 0, 1)
            await asyncio.sleep(0.35)
            filling.cancel()
            await asyncio.wait([filling])
            left = sampler.under_way()
        known = {group.position: group for group in left.unfinished}
        assert known.keys() == {0, 1}
        assert sum(each.generation.drawn for group in known.values() for each in group.responses) > before
        async with place(text, talk, processes=1) as there:
            sampler = sampler_of(there, ledger, left)
            for group in (await sampler.fill(1, 0)).kept:
                check_tokens(group)
                for one, before in zip(group.responses, known[group.position].responses, strict=True):
                    kept = before.generation.token_ids
                    assert one.generation.token_ids[: kept.size].tolist() == kept.tolist()
            least = group.prompt_ids.size + min(
                each.generation.token_ids.size for group in known.values() for each in group.responses
            )
            assert all(len(prompt) >= least for engine in there.engines for prompt in engine.prompts)
            await sampler.close()
        ledger.close()

    run(test)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_a_play_goes_on_at_another_server_with_what_the_lost_one_streamed(local_ray, text, talk, end):
    async def test():
        async with place(text, talk, processes=1, seconds=0.1) as there:
            group = asyncio.ensure_future(there.generator.group(0, 0))
            await until(lambda: any(len(engine.running) == GROUP for engine in there.engines))
            await asyncio.sleep(0.35)
            home = next(engine for engine in there.engines if engine.running)
            other = next(engine for engine in there.engines if engine is not home)
            if end == "dies":
                await home.die()
            else:
                home.healthy = home.scheduler_answers = False
                home.seconds_a_token = 60.0
            finished = await group
            check_tokens(finished)
            first = [prompt for prompt in other.prompts][:GROUP]
            assert all(len(prompt) > finished.prompt_ids.size for prompt in first), "not from the beginning"

    run(test)


def test_a_play_that_nobody_waits_for_ends_at_its_server(local_ray, text, talk):
    async def test():
        async with place(text, talk, processes=1, seconds=0.1) as there:
            group = asyncio.ensure_future(there.generator.group(0, 0))
            await until(lambda: any(len(engine.running) == GROUP for engine in there.engines))
            group.cancel()
            await asyncio.wait([group], timeout=5)
            assert group.cancelled()
            await until(lambda: not any(engine.running for engine in there.engines))
            assert there.fleet.load()[1] == 0
            assert sum(member.in_flight for member in there.fleet.members) == 0

    run(test)


def test_errors_come_with_their_own_words(local_ray, text, talk):
    async def test():
        async with place(text, talk, processes=1, environment="fails") as there:
            with pytest.raises(Unjudged, match="no such table"):
                await there.generator.group(0, 0)
        async with place(text, talk, processes=1, max_attempts=2) as there:
            for engine in there.engines:
                engine.fails = lambda number: 500
            with pytest.raises(RolloutError, match=r"gave up after rollout.max_attempts = 2 attempts; last words"):
                await there.generator.group(0, 0)
            for engine in there.engines:
                engine.fails = lambda number: 400
            with pytest.raises(RolloutError, match=r": 400: .*scripted"):
                await there.generator.group(1, 0)

    run(test)
