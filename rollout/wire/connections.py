"""HTTP to one server: aiohttp's protocol and parser without its session, which took most of the time of a request."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import StreamReader
from aiohttp.client_proto import ResponseHandler

KEEP_ALIVE_S = 2.0
"""The server closes idle connections after 5 s; a client that keeps them longer writes into a closing one."""

READ_AHEAD = 1 << 26
"""Bytes of an answer that may wait to be read. With aiohttp's own 64 KiB a long answer stalls its connection. A
server-sent event may be twice as long: 3 million tokens, or 60,000 with the experts of 48 layers."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    """Without its parameters."""
    content: StreamReader


class Connections:
    """Opened as requests need them, and used again. Neither a proxy from the environment nor redirects: servers are
    addressed directly."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Made in the event loop that it is used in."""
        address = urlsplit(url)
        self._tls = address.scheme == "https"
        self._host, self._port = str(address.hostname), address.port or (443 if self._tls else 80)
        self._headers = f"HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        self._headers += f"Authorization: Bearer {api_key}\r\n" if api_key is not None else ""
        self._loop = asyncio.get_running_loop()
        self._busy, self.closed = set[ResponseHandler](), False
        self._idle: list[tuple[float, ResponseHandler]] = []
        """(since when, connection), the newest last."""

    @asynccontextmanager
    async def ask(self, path: str, body: bytes | None, accept: str) -> AsyncIterator[Answer]:
        """The answer to GET without a `body`, else to POST; to be read inside.

        Raises:
            OSError, aiohttp.ClientError, aiohttp.http.HttpProcessingError: there is none.
        """
        connection = self._kept()
        if connection is None:  # one without an answer in its queue counts as false
            connection = await self._opened()
        self._busy.add(connection)
        answered = False
        try:
            assert connection.transport is not None
            connection.set_response_params(read_until_eof=True, read_bufsize=READ_AHEAD)
            method, length = ("GET", "") if body is None else ("POST", f"Content-Length: {len(body)}\r\n")
            head = f"{method} {path} {self._headers}Accept: {accept}\r\n{length}\r\n"
            connection.transport.write(head.encode() + (body or b""))
            message, content = await connection.read()
            while message.code < 200:
                message, content = await connection.read()
            kind = message.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            answered = True
            yield Answer(message.code, kind, content)
        finally:
            self._busy.discard(connection)
            if connection.should_close or self.closed or not answered:
                connection.abort()
            else:
                self._idle.append((time.monotonic(), connection))

    def _kept(self) -> ResponseHandler | None:
        """The idle connection that was used last, if the server still has it."""
        while self._idle:
            since, connection = self._idle.pop()
            if connection.is_connected() and time.monotonic() - since < KEEP_ALIVE_S:
                return connection
            connection.abort()
        return None

    async def _opened(self) -> ResponseHandler:
        def protocol() -> ResponseHandler:
            return ResponseHandler(self._loop)

        _, connection = await self._loop.create_connection(protocol, self._host, self._port, ssl=self._tls or None)
        return connection

    def close(self) -> None:
        """Requests that run end in an error."""
        self.closed = True
        for connection in (*self._busy, *(connection for _, connection in self._idle)):
            if connection.transport is not None:  # the connection's own `abort` would not wake who reads from it
                connection.transport.abort()
