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
from dataclasses import asdict, dataclass
from enum import StrEnum
from operator import attrgetter

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

# Batches and verdicts travel as plain lists: pickling dataclasses takes several times longer.
_request_values = attrgetter("response", "ground_truth", "prompt", "verifier")
_verdict_values = attrgetter("accuracy", "extracted", "rule", "seconds", "error")


def encode_order(order: Order) -> bytes:
    """The bytes of an order."""
    content = [_request_values(each) for each in order.requests] if isinstance(order, Batch) else order.job
    return pickle.dumps(content, protocol=5)


def decode_order(payload: bytes | bytearray) -> Order:
    """The order that `encode_order` wrote."""
    content = pickle.loads(payload)
    if not isinstance(content, list):
        return Single(content)
    return Batch(
        [
            VerificationRequest(response=response, ground_truth=truth, prompt=prompt, verifier=verifier)
            for response, truth, prompt, verifier in content
        ]
    )


def encode_reply(reply: Reply) -> bytes:
    """The bytes of a reply. Lone surrogates of a response survive, as JSON escapes."""
    if isinstance(reply, Signal):
        return json.dumps(reply).encode("ascii")
    results = [asdict(each) if isinstance(each, Deferred) else _verdict_values(each) for each in reply]
    return json.dumps(results).encode("ascii")


def decode_reply(payload: bytes | bytearray) -> Reply:
    """The reply that `encode_reply` wrote. Raises ValueError for anything else."""
    try:
        content = json.loads(payload)
        if isinstance(content, str):
            return Signal(content)
        return [Deferred(**each) if isinstance(each, dict) else _verdict(*each) for each in content]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a reply that is no result: {error}") from None


def _verdict(accuracy: bool, extracted: str | None, rule: str, seconds: float, error: str | None) -> Verdict:
    return Verdict(accuracy=accuracy, extracted=extracted, rule=rule, seconds=seconds, error=error)


class Channel:
    """One end of the connection: frames over a socket pair. Not for use by several threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send_order(self, order: Order, timeout_s: float) -> None:
        """Sends an order to a worker. Raises TimeoutError, OSError."""
        self._send(encode_order(order), timeout_s)

    def receive_order(self) -> Order:
        """Waits for the next order, without limit: a worker's life ends with its connection. Raises EOFError."""
        return decode_order(self._receive(None))

    def send_reply(self, reply: Reply) -> None:
        """Sends a reply to the pool."""
        self._send(encode_reply(reply), None)

    def receive_reply(self, timeout_s: float) -> Reply:
        """Waits for a reply. Raises TimeoutError past the limit, EOFError if the worker is gone, ValueError."""
        return decode_reply(self._receive(timeout_s))

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
