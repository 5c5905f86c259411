"""What the pool and its workers say to each other, and the connection that carries it.

Orders travel as pickle. Replies travel as JSON, because a worker has run code on a model's text: the pool never
unpickles what a worker sends, and a reply of any other form is a ValueError.
"""

import json
import pickle
import select
import socket
import struct
import time
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import attrgetter
from typing import Any

from reward.verdict import Deferred, Verdict, VerificationRequest

FRAME_LIMIT = 1 << 30
"""Bytes of the largest frame that is accepted."""

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests for fast verifiers. The reply has one result for each."""

    requests: list[VerificationRequest]


@dataclass(frozen=True, slots=True)
class Single:
    """One request for a slow verifier, or one symbolic comparison.

    The first reply is `Signal.STARTED`, once everything is imported, so that the time limit does not pay for imports.
    The second has one result.
    """

    job: VerificationRequest | Deferred


class Signal(StrEnum):
    """A reply without results."""

    READY = "ready"
    """The worker serves."""
    STARTED = "started"
    """The time limit of a `Single` runs from here."""


Order = Batch | Single
Result = Verdict | Deferred
Reply = Signal | list[Result]

# Dataclasses travel as (name, values): pickling them as they are takes several times longer.
_TYPES: dict[str, type[Any]] = {"request": VerificationRequest, "deferred": Deferred, "verdict": Verdict}
_FIELDS = {name: tuple(field.name for field in fields(kind)) for name, kind in _TYPES.items()}
_PACKERS = {kind: (name, attrgetter(*_FIELDS[name])) for name, kind in _TYPES.items()}


def _pack(message: Any) -> tuple[str, tuple[Any, ...]]:
    name, values = _PACKERS[type(message)]
    return name, values(message)


def _unpack(packed: Any) -> Any:
    name, values = packed
    return _TYPES[name](**dict(zip(_FIELDS[name], values, strict=True)))


class Channel:
    """One end of the connection: frames over a socket pair. Not for use by several threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send_order(self, order: Order, timeout_s: float) -> None:
        """Sends an order to a worker. Raises TimeoutError, OSError."""
        jobs = order.requests if isinstance(order, Batch) else [order.job]
        content = (isinstance(order, Batch), [_pack(job) for job in jobs])
        self._send(pickle.dumps(content, protocol=5), timeout_s)

    def receive_order(self) -> Order:
        """Waits for the next order, without limit: a worker's life ends with its connection. Raises EOFError."""
        is_batch, packed = pickle.loads(self._receive(None))
        jobs = [_unpack(each) for each in packed]
        return Batch(jobs) if is_batch else Single(jobs[0])

    def send_reply(self, reply: Reply) -> None:
        """Sends a reply to the pool. Lone surrogates of a response survive, as JSON escapes."""
        content = reply.value if isinstance(reply, Signal) else [_pack(result) for result in reply]
        self._send(json.dumps(content).encode("ascii"), None)

    def receive_reply(self, timeout_s: float) -> Reply:
        """Waits for a reply. Raises TimeoutError past the limit, EOFError if the worker is gone, ValueError."""
        payload = self._receive(timeout_s)
        try:
            content = json.loads(payload)
            return Signal(content) if isinstance(content, str) else [_unpack(each) for each in content]
        except (TypeError, LookupError, ValueError, RecursionError) as error:
            raise ValueError(f"a reply that is no result: {error}") from None

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
