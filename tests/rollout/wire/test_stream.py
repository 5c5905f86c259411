"""Responses in segments: what a server has passed on outlives it, and nothing else about a response changes."""

import asyncio
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from aiohttp import StreamReader

from rollout.errors import RolloutError, ServerRefused
from rollout.generation import FinishReason
from rollout.wire.reply import Finish, Segment, StreamedError, events, frame, join_segments, read_part
from tests.rollout.fleet_kit import check_tokens, fleet_of, request, run, until
from tests.rollout.standin import StandIn


def streaming(interval: int = 2, seconds_a_token: float = 0.0) -> StandIn:
    server = StandIn(seconds_a_token=seconds_a_token)
    server.stream_interval = interval
    return server


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_put_together_however_they_are_cut(size: int) -> None:
    body = b'data: {"a":1}\n\ndata: {"b":"data: "}\n\ndata: [DONE]\n\ndata: {"cut off":'
    pieces = [body[at : at + size] for at in range(0, len(body), size)]

    async def read(content: StreamReader) -> list[bytes]:
        return [event.strip() async for event in events(content)]

    async def test() -> None:
        content = StreamReader(Mock(), limit=2**16, loop=asyncio.get_running_loop())
        reading = asyncio.ensure_future(read(content))
        for piece in pieces:
            content.feed_data(piece)
            await asyncio.sleep(0)
        content.feed_eof()
        assert await reading == [b'{"a":1}', b'{"b":"data: "}']

    run(test)


def test_segments_make_the_response() -> None:
    first, ends = read_part(
        b'{"output_ids":[3],"meta_info":{"finish_reason":null,"output_token_logprobs":[[-1,3,null]]}}'
    )
    assert (ends, first.finish_reason) == (False, FinishReason.ABORT)
    last, ends = read_part(
        b'{"output_ids":[4],"meta_info":{"finish_reason":{"type":"stop","matched":4},"weight_version":"5",'
        b'"output_token_logprobs":[[-0.5,4,null]]}}'
    )
    assert ends
    whole = join_segments([first, last])
    assert whole.token_ids.tolist() == [3, 4]
    assert whole.log_probs.tolist() == [-1.0, -0.5]
    assert (whole.finish_reason, whole.weight_label) == (FinishReason.STOP, "5")
    with pytest.raises(StreamedError, match="too long") as caught:
        read_part(b'{"error":{"message":"too long","type":"invalid_request_error","code":400}}')
    assert caught.value.status == 400


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 5, 6])
def test_a_streamed_response_is_the_same(tokens: int, packs: bool) -> None:
    async def test() -> None:
        server = streaming()
        server.packs = packs
        async with fleet_of(server) as fleet:
            answer = await fleet.generate(request(tokens=tokens))
        check_tokens(answer, 1, tokens)
        assert answer.finish_reason is FinishReason.LENGTH
        assert (server.segments, server.packed_answers) == (tokens // 2 + 1, packs)

    run(test)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("settings", [{"stream_every": 0}, {}])
def test_who_cannot_stream_or_may_not_is_not_asked_to(settings: dict, packs: bool) -> None:
    async def test() -> None:
        server = streaming() if settings else StandIn()
        server.packs = packs
        async with fleet_of(server, **settings) as fleet:
            check_tokens(await fleet.generate(request(tokens=6)), 1, 6)
        assert (server.segments, server.packed_answers) == (0, packs)

    run(test)


def test_what_a_killed_server_had_passed_on_is_not_drawn_again() -> None:
    async def test() -> None:
        servers = [streaming(4, 0.02) for _ in range(2)]
        parts = []
        async with fleet_of(*servers, observe=parts.append) as fleet:
            answer = asyncio.ensure_future(fleet.generate(request(tokens=40)))
            await until(lambda: sum(server.segments for server in servers) == 3)
            first = next(server for server in servers if server.running)
            await first.die()
            check_tokens(await answer, 1, 40)
        other = next(server for server in servers if server is not first)
        assert [len(prompt) for prompt in other.prompts] == [1 + 12]
        assert [part.tokens for part in parts] == [12, 28]

    run(test)


def test_a_hung_server_s_segments_are_kept_too() -> None:
    async def test() -> None:
        servers = [streaming(4, 0.02) for _ in range(2)]
        async with fleet_of(*servers) as fleet:
            answer = asyncio.ensure_future(fleet.generate(request(tokens=30)))
            await until(lambda: sum(server.segments for server in servers) == 3)
            first = next(server for server in servers if server.running)
            first.healthy = False
            first.seconds_a_token = 60.0
            check_tokens(await answer, 1, 30)
        other = next(server for server in servers if server is not first)
        assert [len(prompt) for prompt in other.prompts] == [1 + 12]

    run(test)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("repeats_itself", [True, False])
def test_a_publish_goes_on_from_every_token(folders: list[Path], repeats_itself: bool, packs: bool) -> None:
    async def test() -> None:
        server = streaming(4, 0.02)
        server.repeats_itself, server.packs = repeats_itself, packs
        async with fleet_of(server) as fleet:
            answer = asyncio.ensure_future(fleet.generate(request(tokens=40)))
            await until(lambda: server.segments == 2)
            await fleet.publish(folders[0], 1)
            drawn = await answer
        check_tokens(drawn, 1, 40)
        assert set(drawn.weight_versions.tolist()) == {0, 1}

    run(test)


def arrays(*ids: int) -> dict[str, bytes]:
    return {"token_ids": np.array(ids, np.int32).tobytes(), "log_probs": np.full(len(ids), -1, np.float32).tobytes()}


@pytest.mark.parametrize(
    ("spoilt", "kept"),
    [
        (b"{not json", 0),
        (b'{"output_ids":[99999999],"meta_info":{"finish_reason":null,"output_token_logprobs":[[-1,99999999,""]]}}', 0),
        (b'{"error":{"message":"scripted","code":503}}', 2),
        (b"\xff\xff\xff\xff", 0),
        (b"\x05\x00\x00\x00 what", 0),
        (b"\x40\x00\x00\x00 cut off", 2),
        (frame(Segment(**arrays(99999999))), 0),
        (frame(Segment(**arrays(3, 4) | {"log_probs": b"\x00\x00\x00\x00"})), 0),
        (frame(Segment(**arrays(3) | {"token_ids": b"\x00\x00\x00"})), 0),
        (frame(Segment(**arrays(3), finish=Finish(type="tired"))), 0),
        (frame(Segment(error="scripted", code=503)), 2),
    ],
)
def test_a_broken_segment_is_another_attempt(spoilt: bytes, kept: int) -> None:
    """Of a server that sends what cannot be, nothing is kept; of one that gives up, what it had sent."""

    async def test() -> None:
        server = streaming(2)
        server.packs = not spoilt.startswith(b"{")
        server.spoils = lambda number: spoilt if number == 1 else None
        server.breaks_off = spoilt.endswith(b"cut off")
        async with fleet_of(server) as fleet:
            check_tokens(await fleet.generate(request(tokens=6)), 1, 6)
        assert [len(prompt) for prompt in server.prompts] == [1, 1 + kept]

    run(test)


@pytest.mark.parametrize("packs", [True, False])
def test_an_error_in_the_stream_counts_as_its_status_says(packs: bool) -> None:
    def error(words: str, code: int) -> bytes:
        if packs:
            return frame(Segment(error=words, code=code))
        return b'{"error":{"message":"%b","code":%d}}' % (words.encode(), code)

    async def test() -> None:
        server = streaming(2)
        server.packs = packs
        server.spoils = lambda number: error("longer than the context", 400)
        async with fleet_of(server) as fleet:
            with pytest.raises(ServerRefused, match="longer than the context"):
                await fleet.generate(request())
        server.spoils = lambda number: error("out of breath", 500)
        async with fleet_of(server, max_attempts=2) as fleet:
            with pytest.raises(RolloutError, match=r"(?s)max_attempts = 2.*out of breath"):
                await fleet.generate(request())

    run(test)


def test_what_is_left_at_the_end_of_the_context_is_asked_for_once_and_never_missed(folders: list[Path]) -> None:
    """A server refuses a prompt that fills its context but for a few tokens; as one that goes on after a publish."""

    async def test() -> None:
        for left, ends in ((4, True), (20, False)):
            server = streaming(4, 0.02)
            async with fleet_of(server) as fleet:
                answer = asyncio.ensure_future(fleet.generate(request(tokens=12 + left)))
                await until(lambda server=server: server.segments == 3)
                server.fails = lambda number: 400
                await fleet.publish(folders[0], 1)
                if not ends:
                    with pytest.raises(ServerRefused, match="scripted"):
                        await answer
                    continue
                drawn = await answer
            assert 12 <= drawn.token_ids.size < 12 + left
            check_tokens(drawn, 1, drawn.token_ids.size)
            assert drawn.finish_reason is FinishReason.LENGTH
            assert drawn.weight_versions.tolist() == [0] * drawn.token_ids.size

    run(test)


def test_a_server_that_is_lost_right_behind_the_last_token_is_asked_for_nothing_more() -> None:
    async def test() -> None:
        server = streaming(2)
        server.spoils = lambda number: frame(Segment(error="scripted", code=503)) if number == 2 else None
        async with fleet_of(server) as fleet:
            answer = await fleet.generate(request(tokens=4))
        check_tokens(answer, 1, 4)
        assert answer.finish_reason is FinishReason.LENGTH
        assert len(server.prompts) == 1

    run(test)
