"""What the pool and its workers say to each other, in frames: the length and the number of the order (8 bytes each, big
endian), then the content. A reply has its order's number, which tells it from what a job has sent itself.

An order is a pickle of its jobs and whether they need imports: then a first reply, READY, comes once these are done, so
that the time limit does not pay for them. The next one has a result for each job. Replies travel as JSON, because a
worker has run code on a model's text: the pool never unpickles what a worker sends, and a reply of any other form is a
ValueError.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from reward.environment import Step, Stepped, outcome_of
from reward.verdict import Deferred, Verdict, VerificationRequest

HEADER = struct.Struct(">QQ")
FRAME_LIMIT = 1 << 30
"""Bytes of the largest content that the pool reads."""

Job = VerificationRequest | Deferred | Step
Result = Verdict | Deferred | Stepped
Reply = Sequence[Result] | None
READY = None
"""The reply without results: the worker serves, or has imported what an order needs."""


_VERDICT = ("accuracy", "extracted", "rule", "seconds", "error")
_verdict_values = attrgetter(*_VERDICT)


def needed(job: Job) -> str:
    """Name of what must be imported for the job; empty: for algebra."""
    return "" if isinstance(job, Deferred) else job.environment if isinstance(job, Step) else job.verifier


def encode_reply(reply: Reply, number: int) -> bytes:
    """The frame of a reply. Lone surrogates of a response survive, as JSON escapes."""
    content: Any = None
    if reply is not READY:
        content = [_verdict_values(each) if isinstance(each, Verdict) else asdict(each) for each in reply]
    frame = json.dumps(content).encode("ascii")
    return HEADER.pack(len(frame), number) + frame


def decode_reply(content: bytes) -> Reply:
    """The reply that `encode_reply` wrote. Raises ValueError for anything else."""
    try:
        results = json.loads(content)
        return READY if results is None else [_result(each) for each in results]
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
