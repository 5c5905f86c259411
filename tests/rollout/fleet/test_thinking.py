"""Forced interruption of thinking by the request loop: what is asked for, what is given, and what counts as drawn.

Token j of everything behind a stand-in's first prompt token is 10 x version + j % 10, also where j - 1 was given.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.generation import FinishReason, Generation, GenerationRequest, SamplingParams, ThinkingLimit
from tests.rollout.fleet.test_response import Canned, answer
from tests.rollout.fleet_kit import fleet_of, request, run, until
from tests.rollout.folders import VOCABULARY
from tests.rollout.standin import StandIn

BUDGET, TOKENS, PHRASE, END, MARK = 6, 20, (90, 91, 92), 89, 77


def thinking(
    name: str = "r", ended: Callable[[np.ndarray], bool] = lambda drawn: MARK in drawn, **changed: Any
) -> GenerationRequest:
    limit = ThinkingLimit(**{"budget": BUDGET, "end_ids": PHRASE, "ended": ended} | changed)
    sampling = SamplingParams(max_new_tokens=TOKENS, stop_token_ids=(END,), thinking=limit)
    return replace(request(name), sampling=sampling)


def check(generation: Generation) -> None:
    """20 tokens drawn, each at its place and by the version it says; the phrase behind the sixth."""
    assert generation.given == ((BUDGET, len(PHRASE)),)
    ids = generation.token_ids.tolist()
    assert generation.token_ids.dtype == np.int32
    assert tuple(ids[BUDGET : BUDGET + len(PHRASE)]) == PHRASE
    drawn = ids[:BUDGET] + ids[BUDGET + len(PHRASE) :]
    assert len(drawn) == generation.drawn == generation.log_probs.size == generation.weight_versions.size == TOKENS
    places = [1 + at + (len(PHRASE) if at >= BUDGET else 0) for at in range(TOKENS)]
    wanted = [10 * by + place % 10 for by, place in zip(generation.weight_versions.tolist(), places, strict=True)]
    assert drawn == wanted
    np.testing.assert_array_equal(generation.log_probs, -generation.weight_versions.astype(np.float32))
    assert generation.finish_reason is FinishReason.LENGTH


def test_the_phrase_is_given_at_the_budget_and_the_rest_is_drawn() -> None:
    async def test() -> None:
        server = StandIn()
        looked_at: list[list[int]] = []

        def ended(drawn: np.ndarray) -> bool:
            looked_at.append(drawn.tolist())
            return False

        async with fleet_of(server) as fleet:
            generation = await fleet.generate(thinking(ended=ended))
        check(generation)
        assert looked_at == [[1, 2, 3, 4, 5, 6]], "once"
        assert server.prompts == [[7], [7, 1, 2, 3, 4, 5, 6, *PHRASE]]

    run(test)


@pytest.mark.parametrize("seconds", [0.02, 0.06, 0.12, 0.2, 0.3])
@pytest.mark.parametrize("packs", [True, False])
def test_a_publish_in_either_stretch_changes_nothing_but_the_versions(
    folders: list[Path], seconds: float, packs: bool
) -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.02)
        server.packs, server.stream_interval = packs, 2
        async with fleet_of(server, stream_every=2) as fleet:
            await fleet.publish(folders[0], 1)
            task = asyncio.ensure_future(fleet.generate(thinking()))
            await until(lambda: server.running)
            await asyncio.sleep(seconds)
            await fleet.publish(folders[1], 2)
            generation = await task
        check(generation)
        assert set(generation.weight_versions.tolist()) == {1, 2}
        assert (np.diff(generation.weight_versions) >= 0).all()
        asked = [len(prompt) for prompt in server.prompts]
        assert 1 + BUDGET + len(PHRASE) in asked or max(asked) > 1 + BUDGET + len(PHRASE)
        assert not any(1 + BUDGET <= tokens < 1 + BUDGET + len(PHRASE) for tokens in asked), "never without the phrase"

    run(test)


@pytest.mark.parametrize("stretch", [0, 1])
def test_a_server_that_dies_in_either_stretch_is_replaced_by_another(stretch: int) -> None:
    async def test() -> None:
        servers = [
            StandIn(
                seconds_a_token=0.02,
            )
            for _ in range(2)
        ]
        for server in servers:
            server.stream_interval = 2
        prompts = [lambda: any(server.prompts for server in servers)]
        prompts.append(lambda: any(len(prompt) > 1 + BUDGET for server in servers for prompt in server.prompts))
        async with fleet_of(*servers, stream_every=2) as fleet:
            task = asyncio.ensure_future(fleet.generate(thinking()))
            await until(prompts[stretch])
            await until(lambda: any(server.running for server in servers))
            await asyncio.sleep(0.07)
            await next(server for server in servers if server.running).die()
            check(await task)
        assert all(server.prompts for server in servers)

    run(test)


def test_deterministic_servers_get_the_seed_of_the_response_for_both_stretches() -> None:
    async def test() -> None:
        server = StandIn()
        server.says = {"enable_deterministic_inference": True}
        async with fleet_of(server, deterministic=True) as fleet:
            check(await fleet.generate(replace(thinking(), seed=41)))
        assert server.seeds == [41, 41]

    run(test)


def test_who_ended_its_thinking_goes_on_without_the_phrase() -> None:
    async def test() -> None:
        first, second = [3, 3, MARK, 3, 3, 3], [4, 4, END]
        server = Canned(answer(first, "length", length=BUDGET), answer(second))
        async with fleet_of(server) as fleet:
            generation = await fleet.generate(thinking())
        assert (generation.token_ids.tolist(), generation.given) == (first + second, ())
        assert generation.finish_reason is FinishReason.STOP
        assert server.prompts == [[7], [7, *first]]

    run(test)


def test_a_response_shorter_than_the_budget_is_left_alone() -> None:
    async def test() -> None:
        server = Canned(answer([3, 3, END]))
        async with fleet_of(server) as fleet:
            generation = await fleet.generate(thinking())
        assert (generation.token_ids.tolist(), generation.given) == ([3, 3, END], ())
        assert len(server.prompts) == 1

    run(test)


@pytest.mark.parametrize("kind", ["stop", "length", "abort"])
def test_a_response_whose_last_token_is_at_the_budget_has_ended(kind: str) -> None:
    """A server reports the limit there, which it checks before the stop token."""

    async def test() -> None:
        server = Canned(answer([3, 3, 3, 3, 3, END], kind))
        async with fleet_of(server) as fleet:
            generation = await fleet.generate(thinking())
        assert (generation.token_ids.tolist(), generation.given) == ([3, 3, 3, 3, 3, END], ())
        assert generation.finish_reason is FinishReason.STOP
        assert len(server.prompts) == 1

    run(test)


def test_an_abort_at_the_very_budget_is_the_budget() -> None:
    async def test() -> None:
        server = Canned(answer([3, 3, 3], "abort"), answer([3, 3, 3], "abort"), answer([], "abort"), answer([4, END]))
        async with fleet_of(server, max_attempts=9) as fleet:
            generation = await fleet.generate(thinking())
        assert generation.token_ids.tolist() == [3] * 6 + [*PHRASE, 4, END]
        assert (generation.given, generation.drawn) == (((6, 3),), 8)
        assert server.prompts == [[7], [7, 3, 3, 3], *[[7, *[3] * 6, *PHRASE]] * 2]

    run(test)


def test_a_budget_of_nothing_gives_the_phrase_first() -> None:
    """The rest of a response whose only thought was drawn before."""

    async def test() -> None:
        server = Canned(answer([4, END]))
        async with fleet_of(server) as fleet:
            generation = await fleet.generate(thinking(budget=0))
        assert (generation.token_ids.tolist(), generation.given) == ([*PHRASE, 4, END], ((0, 3),))
        assert server.prompts == [[7, *PHRASE]]

    run(test)


def test_a_server_without_room_is_named_in_the_first_stretch_too() -> None:
    async def test() -> None:
        limit = ThinkingLimit(budget=50, end_ids=PHRASE, ended=lambda drawn: False)
        asked = replace(request(), sampling=SamplingParams(max_new_tokens=100, thinking=limit))
        server = Canned(answer([3] * 45, "length", length=45))
        async with fleet_of(server) as fleet:
            with pytest.raises(Exception, match=r"45 tokens of 100: its context or KV cache"):
                await fleet.generate(asked)
            with pytest.raises(ValueError, match=f"token id {VOCABULARY} is outside"):
                await fleet.generate(thinking(end_ids=(VOCABULARY,)))

    run(test)
