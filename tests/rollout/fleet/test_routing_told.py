"""Which experts each token was sent to: the request loop asks every server for the rows that are missing, and refuses
wrong ones."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.errors import RolloutError, ServerUnfit
from rollout.generation import FinishReason, Generation, GenerationRequest, ThinkingLimit
from rollout.wire.reply import segment_of
from tests.rollout.fleet.test_response import Canned, answer
from tests.rollout.fleet_kit import check_tokens, fleet_of, request, run, until
from tests.rollout.standin import SHAPE, StandIn, experts_at

TOKENS, PROMPT = 30, (7, 8, 9)


def asked(name: str = "r", **changes: Any) -> GenerationRequest:
    return replace(request(name, tokens=TOKENS, prompt=PROMPT), routing=SHAPE, **changes)


def check(generation: Generation, versions: np.ndarray | None = None) -> None:
    """A row for each token but the last; `versions` [rows], None: those that drew the tokens behind the first."""
    assert generation.routing is not None
    assert generation.routing.dtype == np.uint8
    rows = len(PROMPT) + generation.token_ids.size - 1
    if versions is None:
        first = np.full(len(PROMPT) - 1, generation.weight_versions[0])
        versions = np.concatenate([first, generation.weight_versions])
    np.testing.assert_array_equal(generation.routing, experts_at(np.arange(rows), versions))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("packs", [True, False])
def test_after_a_publish_each_row_is_of_the_weights_that_drew_the_token(
    folders: list[Path], packs: bool, streams: bool
) -> None:
    async def test() -> None:
        server = StandIn(seconds_a_token=0.01)
        server.packs, server.stream_interval = packs, 4 if streams else None
        server.says = {"enable_return_routed_experts": True}
        async with fleet_of(server, stream_every=4) as fleet:
            await fleet.publish(folders[0], 1)
            task = asyncio.ensure_future(fleet.generate(asked()))
            for version in (2, 3):
                await until(lambda: server.running)
                await asyncio.sleep(0.06)
                await fleet.publish(folders[0], version)
            generation = await task
            plain = await fleet.generate(replace(asked("other"), routing=None))
        check_tokens(generation, len(PROMPT), TOKENS)
        assert set(generation.weight_versions.tolist()) == {1, 2, 3}
        # The last token before a publish is read by the weights that draw the next one.
        check(generation)
        assert plain.routing is None

    run(test)


def test_rows_of_what_a_lost_server_had_streamed_are_told_by_the_next_one() -> None:
    async def test() -> None:
        servers = [StandIn(seconds_a_token=0.01) for _ in range(2)]
        for server in servers:
            server.stream_interval = 4
        async with fleet_of(*servers, stream_every=4) as fleet:
            task = asyncio.ensure_future(fleet.generate(asked()))
            await until(lambda: any(server.segments > 2 for server in servers))
            loser = next(server for server in servers if server.running)
            begun = fleet.so_far("r")
            await loser.die()
            generation = await task
        check_tokens(generation, len(PROMPT), TOKENS)
        check(generation)
        assert begun is not None
        assert begun.drawn > 0
        assert begun.routing is None

    run(test)


def test_a_response_that_had_lost_its_place_when_it_was_interrupted_gets_its_rows_later(folders: list[Path]) -> None:
    """SGLang then answers the tokens without rows."""

    async def test() -> None:
        server = StandIn(seconds_a_token=0.01)
        server.repeats_itself, server.stream_interval = True, 4
        async with fleet_of(server, stream_every=4) as fleet:
            await fleet.publish(folders[0], 1)
            task = asyncio.ensure_future(fleet.generate(asked()))
            await until(lambda: server.running)
            await asyncio.sleep(0.1)
            await fleet.publish(folders[0], 2)
            generation = await task
        check_tokens(generation, len(PROMPT), TOKENS)
        assert set(generation.weight_versions.tolist()) == {1, 2}
        check(generation, np.full(len(PROMPT) + TOKENS - 1, 2))

    run(test)


def test_a_complete_response_without_rows_is_read_once_more_and_nothing_is_drawn() -> None:
    async def test() -> None:
        whole, started = Canned(answer([3] * TOKENS, "abort")), asked()
        async with fleet_of(whole) as fleet:
            first = await fleet.generate(started)
            again = await fleet.generate(replace(started, begun=replace(first, routing=None)))
            part = await fleet.generate(replace(started, begun=replace(first, routing=first.routing[:9])))
        for each in (first, again, part):
            assert each.token_ids.tolist() == [3] * TOKENS
            assert each.finish_reason is FinishReason.LENGTH
            check(each)
        assert [len(prompt) for prompt in whole.prompts] == [3, 33, 33, 33]

    run(test)


@pytest.mark.parametrize("left", [0, 5])
def test_a_response_too_long_to_be_read_once_more_for_its_rows_is_drawn_anew(left: int) -> None:
    """SGLang draws up to 2 tokens from the end of the context, and reads prompts up to 7 from it."""

    async def test() -> None:
        server = StandIn()
        server.fails = lambda number: 400 if len(server.prompts[-1]) > len(PROMPT) + TOKENS - 7 else None
        async with fleet_of(server) as fleet:
            first = await fleet.generate(asked())
            columns = ("token_ids", "log_probs", "weight_versions")
            kept = {name: getattr(first, name)[: TOKENS - left] for name in columns}
            begun = replace(first, **kept, routing=None, finish_reason=FinishReason.ABORT)
            again = await fleet.generate(replace(asked(), begun=begun))
        check(again)
        np.testing.assert_array_equal(again.token_ids, first.token_ids)

    run(test)


def test_the_stop_token_of_a_response_without_rows_still_ends_it() -> None:
    async def test() -> None:
        server = Canned(answer([3, 2], "abort"))
        one = asked()
        one = replace(one, sampling=replace(one.sampling, stop_token_ids=(2,)))
        async with fleet_of(server) as fleet:
            first = await fleet.generate(one)
            again = await fleet.generate(replace(one, begun=replace(first, routing=None)))
        for each in (first, again):
            assert each.token_ids.tolist() == [3, 2]
            assert each.finish_reason is FinishReason.STOP
            check(each)
        assert [len(prompt) for prompt in server.prompts] == [3, 5, 5]

    run(test)


def test_a_run_that_goes_on_asks_for_the_missing_rows_only() -> None:
    async def test() -> None:
        server = StandIn()
        async with fleet_of(server) as fleet:
            first = await fleet.generate(asked())
            begun = replace(
                first,
                token_ids=first.token_ids[:9],
                log_probs=first.log_probs[:9],
                weight_versions=first.weight_versions[:9],
                routing=np.full((11, 3, 2), 250, np.uint8),  # kept as they are
                finish_reason=FinishReason.ABORT,
            )
            again = await fleet.generate(replace(asked(), begun=begun))
            none = await fleet.generate(replace(asked(), begun=begun, routing=None))
        assert (again.routing[:11] == 250).all()
        np.testing.assert_array_equal(again.routing[11:], first.routing[11:])
        assert none.routing is None
        np.testing.assert_array_equal(none.token_ids, first.token_ids)

    run(test)


def test_the_phrase_that_ends_the_thinking_has_rows() -> None:
    async def test() -> None:
        limit = ThinkingLimit(budget=6, end_ids=(90, 91), ended=lambda drawn: False)
        one = asked()
        async with fleet_of(StandIn()) as fleet:
            generation = await fleet.generate(replace(one, sampling=replace(one.sampling, thinking=limit)))
        assert generation.given == ((6, 2),)
        check(generation, np.zeros(len(PROMPT) + TOKENS + 2 - 1, int))

    run(test)


def twice(rows: np.ndarray) -> np.ndarray:
    rows[5, 1] = 4
    return rows


def outside(rows: np.ndarray) -> np.ndarray:
    rows[5, 1] = 2, 6
    return rows


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (twice, r"response r, token 5, layer 1: experts \[4, 4\], where 2 different ones of 0 .. 5 belong"),
        (outside, r"response r, token 5, layer 1: experts \[2, 6\]"),
        (lambda rows: rows[1:], "response r, tokens 0 to 31: 186 experts in place of 192, 2 in each of 3 layers"),
        (lambda rows: np.concatenate([rows, rows]), "384 experts in place of 192"),
        (lambda rows: rows - 6, r"routed_experts -6 \.\. -1"),
        (lambda rows: rows + 255, r"routed_experts 255 \.\. 260, where only 0 \.\. 255 are understood"),
    ],
    ids=["twice", "outside", "few", "many", "negative", "large"],
)
def test_wrong_rows_are_asked_for_again_and_named(spoil: Callable[[np.ndarray], np.ndarray], words: str) -> None:
    async def test() -> None:
        server = StandIn()
        server.packs = False
        sent: list[int] = []

        def once(rows: np.ndarray) -> np.ndarray:
            sent.append(len(rows))
            return rows if len(sent) == 2 else spoil(rows.copy())

        server.spoils_experts = once
        async with fleet_of(server, max_attempts=2) as fleet:
            check(await fleet.generate(asked()))
            assert sent == [32, 32]
            with pytest.raises(RolloutError, match=words):
                await fleet.generate(asked())

    run(test)


def test_a_complete_answer_without_rows_is_refused() -> None:
    async def test() -> None:
        server = Canned(*[answer([3] * TOKENS, "length", length=TOKENS)] * 2)
        async with fleet_of(server, max_attempts=2) as fleet:
            with pytest.raises(RolloutError, match="response r, tokens 0 to 31: 0 experts in place of 192"):
                await fleet.generate(asked())

    run(test)


def test_a_server_that_cannot_tell_is_refused_when_it_starts() -> None:
    async def test() -> None:
        server = StandIn()
        with pytest.raises(ServerUnfit, match=r"actor\.routing_replay needs a server with --enable-return-routed"):
            async with fleet_of(server, routed_experts=True):
                pass
        server.says = {"enable_return_routed_experts": True}
        async with fleet_of(server, routed_experts=True) as fleet:
            check(await fleet.generate(asked()))

    run(test)


def test_a_frame_without_rows_is_that_of_before_and_one_with_them_takes_a_byte_an_expert() -> None:
    plain = segment_of(answer([3, 4]))
    assert plain.routing is None
    told = answer([3, 4])
    told["meta_info"]["routed_experts"] = "AAAAAAEAAAD/AAAA"
    assert segment_of(told).routing == bytes([0, 1, 255])
    told["meta_info"]["routed_experts"] = "AAAAAAEAAAAAAQAA"
    with pytest.raises(ValueError, match=r"routed_experts 0 \.\. 256"):
        segment_of(told)
