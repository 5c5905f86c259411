"""What the pool and its workers say to each other, in frames: the length (8 bytes, big endian), then the content.

Orders travel as pickle. Replies travel as JSON, because a worker has run code on a model's text: the pool never
unpickles what a worker sends, and a reply of any other form is a ValueError.
"""

import json
import pickle
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from reward.verdict import Deferred, Verdict, VerificationRequest

LENGTH = struct.Struct(">Q")
FRAME_LIMIT = 1 << 30
"""Bytes of the largest content that the pool reads."""

Job = VerificationRequest | Deferred
Result = Verdict | Deferred
Reply = Sequence[Result] | None
READY = None
"""The reply without results: the worker serves, or has imported what an order needs."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker judges. The reply has one result for each job."""

    jobs: Sequence[Job]
    alone: bool
    """One job for a slow verifier or for algebra. A first reply, READY, comes once everything is imported, so that the
    time limit does not pay for imports. Otherwise: requests for fast verifiers."""


# Requests and verdicts travel as plain tuples: pickling dataclasses takes several times longer.
_request_values = attrgetter("response", "ground_truth", "prompt", "verifier")
_verdict_values = attrgetter("accuracy", "extracted", "rule", "seconds", "error")


def encode_order(order: Order) -> bytes:
    """The content of an order's frame."""
    jobs = [_request_values(job) if isinstance(job, VerificationRequest) else job for job in order.jobs]
    return pickle.dumps((jobs, order.alone), protocol=5)


def decode_order(content: bytes) -> Order:
    """The order that `encode_order` wrote."""
    jobs, alone = pickle.loads(content)
    return Order([_request(*job) if isinstance(job, tuple) else job for job in jobs], alone)


def _request(response: str, ground_truth: str, prompt: str, verifier: str) -> VerificationRequest:
    return VerificationRequest(response=response, ground_truth=ground_truth, prompt=prompt, verifier=verifier)


def encode_reply(reply: Reply) -> bytes:
    """The frame of a reply. Lone surrogates of a response survive, as JSON escapes."""
    content = None if reply is READY else [_result_values(result) for result in reply]
    frame = json.dumps(content).encode("ascii")
    return LENGTH.pack(len(frame)) + frame


def _result_values(result: Result) -> Any:
    return asdict(result) if isinstance(result, Deferred) else _verdict_values(result)


def decode_reply(content: bytes) -> Reply:
    """The reply that `encode_reply` wrote. Raises ValueError for anything else."""
    try:
        results = json.loads(content)
        if results is None:
            return READY
        return [Deferred(**each) if isinstance(each, dict) else _verdict(*each) for each in results]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a reply that is no result: {error}") from None


def _verdict(accuracy: bool, extracted: str | None, rule: str, seconds: float, error: str | None) -> Verdict:
    return Verdict(accuracy=accuracy, extracted=extracted, rule=rule, seconds=seconds, error=error)
