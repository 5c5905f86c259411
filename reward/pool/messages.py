"""What the pool and its workers say to each other, in frames: the length (8 bytes, big endian), then the content.

Orders travel as pickle. Replies travel as JSON, because a worker has run code on a model's text: the pool never
unpickles what a worker sends, and a reply of any other form is a ValueError.
"""

import json
import pickle
import struct
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from reward.environment import Step, Stepped, outcome_of
from reward.verdict import Deferred, Verdict, VerificationRequest

LENGTH = struct.Struct(">Q")
FRAME_LIMIT = 1 << 30
"""Bytes of the largest content that the pool reads."""

Job = VerificationRequest | Deferred | Step
Result = Verdict | Deferred | Stepped
Reply = Sequence[Result] | None
READY = None
"""The reply without results: the worker serves, or has imported what an order needs."""


# Requests and verdicts travel as plain tuples: pickling dataclasses takes several times longer.
_REQUEST = ("response", "ground_truth", "prompt", "verifier")
_VERDICT = ("accuracy", "extracted", "rule", "seconds", "error")
_request_values, _verdict_values = attrgetter(*_REQUEST), attrgetter(*_VERDICT)


def encode_order(jobs: Sequence[Job], alone: bool) -> bytes:
    """The content of an order's frame: what a worker judges. The reply has one result for each job.

    Args:
        alone: it is one job for a slow verifier, an environment or algebra. A first reply, READY, comes once all is
            imported, so that the time limit does not pay for imports. Otherwise: requests for fast verifiers.
    """
    values = [_request_values(job) if isinstance(job, VerificationRequest) else job for job in jobs]
    return pickle.dumps((values, alone), protocol=5)


def decode_order(content: bytes) -> tuple[list[Job], bool]:
    """The jobs that `encode_order` wrote, and whether it is one alone."""
    values, alone = pickle.loads(content)
    requests = (dict(zip(_REQUEST, each, strict=True)) if isinstance(each, tuple) else each for each in values)
    return [VerificationRequest(**each) if isinstance(each, dict) else each for each in requests], alone


def encode_reply(reply: Reply) -> bytes:
    """The frame of a reply. Lone surrogates of a response survive, as JSON escapes."""
    content: Any = None
    if reply is not READY:
        content = [_verdict_values(each) if isinstance(each, Verdict) else asdict(each) for each in reply]
    frame = json.dumps(content).encode("ascii")
    return LENGTH.pack(len(frame)) + frame


def decode_reply(content: bytes) -> Reply:
    """The reply that `encode_reply` wrote. Raises ValueError for anything else."""
    try:
        results = json.loads(content)
        if results is None:
            return READY
        return [_result(each) for each in results]
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a reply that is no result: {error}") from None


def _result(fields: Any) -> Result:
    if not isinstance(fields, dict):
        return Verdict(**dict(zip(_VERDICT, fields, strict=True)))
    if "answer" in fields:
        return Deferred(**fields)
    outcome, kinds = fields.pop("outcome"), {"seconds": int | float, "error": str | None, "unjudged": bool}
    if not all(isinstance(fields[name], kind) for name, kind in kinds.items()):
        raise ValueError("fields of other types")
    return Stepped(outcome=outcome_of(outcome), **fields)
