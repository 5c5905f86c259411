"""What the pool and its workers say to each other, in frames: the length and the number of the order (8 bytes each, big
endian), then the content. A reply has its order's number, which tells it from what a job has sent itself.

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

from reward.environment import Episode, Step, Stepped, Turn, outcome_of
from reward.verdict import Deferred, Verdict, VerificationRequest

HEADER = struct.Struct(">QQ")
FRAME_LIMIT = 1 << 30
"""Bytes of the largest content that the pool reads."""

Job = VerificationRequest | Deferred | Step
Result = Verdict | Deferred | Stepped
Reply = Sequence[Result] | None
READY = None
"""The reply without results: the worker serves, or has imported what an order needs."""


# Requests, steps and verdicts travel as plain tuples: pickling dataclasses takes several times longer.
_REQUEST = ("response", "ground_truth", "prompt", "verifier")
_VERDICT = ("accuracy", "extracted", "rule", "seconds", "error")
_request_values, _verdict_values = attrgetter(*_REQUEST), attrgetter(*_VERDICT)
_turn_values = attrgetter("response", "observation", "token_ids", "role")  # by place, as `Turn` has them


def encode_order(jobs: Sequence[Job], imports: bool) -> bytes:
    """The content of an order's frame: what a worker judges. The reply has one result for each job.

    Args:
        imports: a first reply, READY, comes once all that the jobs need is imported, so that the time limit does not
            pay for it.
    """
    return pickle.dumps(([_sent(job) for job in jobs], imports), protocol=5)


def decode_order(content: bytes) -> tuple[list[Job], bool]:
    """The jobs that `encode_order` wrote, and `imports`."""
    values, imports = pickle.loads(content)
    return [_received(each) for each in values], imports


def needed(job: Job) -> str:
    """Name of what must be imported for the job; empty: for algebra."""
    return "" if isinstance(job, Deferred) else job.environment if isinstance(job, Step) else job.verifier


def _sent(job: Job) -> Any:
    if isinstance(job, Deferred):
        return job
    if isinstance(job, VerificationRequest):
        return "request", _request_values(job)
    asked = job.episode
    turns = [_turn_values(turn) for turn in asked.turns]
    return "step", (job.environment, asked.prompt, asked.ground_truth, turns, asked.state, asked.last)


def _received(values: Any) -> Job:
    if isinstance(values, Deferred):
        return values
    kind, values = values
    if kind == "request":
        return VerificationRequest(**dict(zip(_REQUEST, values, strict=True)))
    environment, prompt, ground_truth, turns, state, last = values
    return Step(environment, Episode(prompt, ground_truth, tuple(Turn(*turn) for turn in turns), state, last))


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
