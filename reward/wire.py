"""Frames over a socket pair, each with a deadline. Requests travel as pickle, replies as JSON.

The parent never unpickles what a worker sends: a worker has run code on a model's text.
"""

import json
import pickle
import select
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">Q")

FRAME_LIMIT = 1 << 30
"""Bytes of the largest frame that is accepted."""


class Channel:
    """One end of the connection between the pool and a worker. Not for use by several threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send_request(self, request: tuple[Any, ...], timeout_s: float | None) -> None:
        """Sends one request to a worker. Raises TimeoutError, OSError."""
        self._send(pickle.dumps(request, protocol=5), timeout_s)

    def receive_request(self) -> tuple[Any, ...]:
        """Waits for the next request, without limit: a worker's life ends with its connection. Raises EOFError."""
        return pickle.loads(self._receive(None))

    def send_reply(self, reply: Any) -> None:
        """Sends one reply to the pool. Lone surrogates survive, as JSON escapes."""
        self._send(json.dumps(reply).encode("ascii"), None)

    def receive_reply(self, timeout_s: float) -> Any:
        """Waits for one reply. Raises TimeoutError past the limit, EOFError if the worker is gone."""
        return json.loads(self._receive(timeout_s))

    def wait(self, timeout_s: float) -> bool:
        """Whether something can be read, or the other end is gone, within the limit."""
        poll = select.poll()  # not select.select: a Ray process may hold more than 1024 descriptors
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Closes this end; a read at the other end then raises EOFError."""
        self._connection.close()

    def _send(self, payload: bytes, timeout_s: float | None) -> None:
        self._connection.settimeout(timeout_s)
        self._connection.sendall(_LENGTH.pack(len(payload)))
        self._connection.sendall(payload)

    def _receive(self, timeout_s: float | None) -> bytearray:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > FRAME_LIMIT:
            raise EOFError(f"frame of {length} bytes; the limit is {FRAME_LIMIT}")
        return self._read(length, deadline)

    def _read(self, size: int, deadline: float | None) -> bytearray:
        received = bytearray(size)
        view = memoryview(received)
        at = 0
        while at < size:
            if deadline is not None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError
                self._connection.settimeout(remaining)
            count = self._connection.recv_into(view[at:])
            if count == 0:
                raise EOFError("the other end is closed")
            at += count
        return received
