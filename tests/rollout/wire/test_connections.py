"""Requests to a server: a connection is used again only where nothing of an answer can still come over it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from rollout.errors import ServerUnavailable
from rollout.fleet.member import Member, State
from rollout.wire.client import SglangClient
from tests.rollout.fleet_kit import closing_client, run
from tests.rollout.standin import StandIn

HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Raw:
    """A server that answers each request with bytes; None: not at all. An empty end closes the connection."""

    def __init__(self, *answers: bytes | None, closes: bool = False) -> None:
        self.answers, self.closes = list(answers), closes
        self.requests: list[tuple[int, bytes]] = []
        """(number of the connection, request)"""
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        mine = self.connections
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests.append((mine, head))
                answer = self.answers.pop(0)
                writer.write(answer or b"")
                await writer.drain()
                if answer is not None and self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def asked(server: Raw, key: str | None = None) -> AsyncIterator[SglangClient]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with closing_client(SglangClient(url, request_deadline_s=5.0, api_key=key)) as client:
        yield client
    listening.close()


def test_a_connection_is_used_again_and_the_head_says_all() -> None:
    async def test() -> None:
        server = Raw(HEALTHY, HEALTHY)
        async with asked(server, key="secret") as client:
            await client.health(1.0)
            await client.health(1.0)
            host = client.url.removeprefix("http://").encode()
        (first, head), (second, _) = server.requests
        assert first == second == 1
        assert head.startswith(b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n")
        assert b"\r\nAuthorization: Bearer secret\r\n" in head

    run(test)


def test_an_interim_answer_is_passed_over() -> None:
    async def test() -> None:
        server = Raw(b"HTTP/1.1 103 Early Hints\r\n\r\n" + HEALTHY, HEALTHY)
        async with asked(server) as client:
            await client.health(1.0)
            await client.health(1.0)
        assert server.connections == 1

    run(test)


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (None, "no answer within 0.2 s"),
        (HEALTHY[:-1], "no answer within 0.2 s"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "HttpProcessingError|Bad"),
    ],
)
def test_what_may_still_come_reaches_no_other_request(first: bytes | None, words: str) -> None:
    """The late answer to a request that was given up would be read as that to the next one."""

    async def test() -> None:
        server = Raw(first, HEALTHY)
        async with asked(server) as client:
            with pytest.raises(ServerUnavailable, match=words):
                await client.health(0.2)
            await client.health(1.0)
        assert [connection for connection, _ in server.requests] == [1, 2]

    run(test)


def test_an_answer_that_breaks_off_is_none() -> None:
    async def test() -> None:
        server = Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", HEALTHY, closes=True)
        async with asked(server) as client:
            with pytest.raises(ServerUnavailable):
                await client.health(1.0)
            await client.health(1.0)

    run(test)


def test_a_connection_that_the_server_has_closed_is_opened_anew() -> None:
    async def test() -> None:
        server = Raw(HEALTHY, HEALTHY, closes=True)
        async with asked(server) as client:
            await client.health(1.0)
            await asyncio.sleep(0.1)
            await client.health(1.0)
        assert server.connections == 2

    run(test)


def test_closing_ends_what_waits() -> None:
    async def test() -> None:
        async with asked(Raw(None)) as client:
            waiting = asyncio.ensure_future(client.health(10.0))
            await asyncio.sleep(0.1)
            await client.close()
            with pytest.raises(ServerUnavailable):
                await asyncio.wait_for(waiting, 2.0)
            with pytest.raises(ServerUnavailable, match="closed"):
                await client.health(1.0)

    run(test)


def member() -> Member:
    return Member(StandIn(), lambda url: SglangClient(url, request_deadline_s=1.0))


async def _call(one: Member, then: Callable[[asyncio.Task], None]) -> asyncio.Task:
    calling = asyncio.ensure_future(one.call(asyncio.sleep(5.0)))
    await asyncio.sleep(0)
    then(calling)
    await asyncio.wait([calling], timeout=1.0)
    return calling


def test_a_call_ends_with_its_server_and_leaves_no_cancellation_behind() -> None:
    async def test() -> None:
        one = member()

        async def caller() -> int:
            with pytest.raises(ServerUnavailable, match="lost"):
                await one.call(asyncio.sleep(5.0))
            await asyncio.sleep(0)
            task = asyncio.current_task()
            assert task is not None
            return task.cancelling()

        calling = asyncio.ensure_future(caller())
        await asyncio.sleep(0)
        one.enter(State.DOWN, "lost")
        assert await asyncio.wait_for(calling, 1.0) == 0
        with pytest.raises(ServerUnavailable, match="lost"):  # down already
            await one.call(asyncio.sleep(5.0))

    run(test)


def test_a_cancelled_call_stays_cancelled_where_its_server_is_lost_as_well() -> None:
    async def test() -> None:
        one = member()

        def both(calling: asyncio.Task) -> None:
            one.enter(State.DOWN, "lost")
            calling.cancel()

        assert (await _call(one, both)).cancelled()

        other = member()
        assert (await _call(other, lambda calling: calling.cancel())).cancelled()

    run(test)
