"""What a server answers to /generate, from JSON to arrays, whole or in segments (server-sent events).

At the paper's size a rollout step brings about 10^8 numbers. None of them becomes a long-lived Python object.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import aiohttp
import msgspec
import numpy as np
import orjson

from rollout.generation import FinishReason

_ROUNDING = 1e-3
"""Nats by which rounding may lift the log-prob of a certain token above 0."""

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_EVENT_START, _EVENT_END, _LAST_EVENT = b"data: ", b"\n\n", b"[DONE]"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reply:
    """What one call of /generate drew, or a segment of it; partial if `finish_reason` is ABORT."""

    token_ids: np.ndarray
    """int32 [T]"""
    log_probs: np.ndarray
    """float32 [T]"""
    finish_reason: FinishReason
    weight_label: str | None
    """The server's name of its weights when it answered."""
    total: int | None = None
    """Tokens of the whole response up to here, as the server counts them; None: it does not say."""


class StreamedError(Exception):
    """The server answered an error in place of a segment, under HTTP status 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Token(msgspec.Struct, array_like=True, gc=False):
    """One entry [log_prob, id, text] of `output_token_logprobs`.

    Not tracked by the garbage collector, which would otherwise run hundreds of times over one long response.
    """

    log_prob: float
    id: int


class Finish(msgspec.Struct, omit_defaults=True):
    """Why a response ended, as SGLang writes it."""

    type: str
    matched: int | str | None = None
    """The stop token's id. A text only where SGLang drew no token at all: its logits were not numbers."""
    status_code: int | None = None
    """Of an abort by the server itself, as an HTTP status: 400 for what it cannot process, 500 and 503 for want of
    memory or room."""
    message: str | None = None


class _Meta(msgspec.Struct):
    """Every version sends `finish_reason` and `output_token_logprobs`; all else is optional."""

    finish_reason: Finish | None
    """None in a segment that is not the last one."""
    output_token_logprobs: list[_Token] | None = None
    weight_version: str | int | None = None
    completion_tokens: int | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Answer(msgspec.Struct):
    meta_info: _Meta | None = None
    output_ids: msgspec.Raw = msgspec.Raw(b"null")
    """Left as bytes: in nearly all cases they are those of the ids among the log-probs."""
    error: _Error | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to the end of the stream, without the last one's "[DONE]".

    An event may be longer than aiohttp reads at once. One that the end of the connection cuts off is left out.
    """
    buffer = bytearray()
    async for chunk in content.iter_any():
        searched = max(len(buffer) - len(_EVENT_END) + 1, 0)
        buffer += chunk
        while (end := buffer.find(_EVENT_END, searched)) >= 0:
            begin = len(_EVENT_START) if buffer.startswith(_EVENT_START) else 0
            with memoryview(buffer) as view:
                data = bytes(view[begin:end])  # the only copy of a segment's ten kilobytes
            del buffer[: end + len(_EVENT_END)]
            searched = 0
            if data != _LAST_EVENT:
                yield data


def read_part(content: bytes) -> tuple[Reply, bool]:
    """(what was drawn, whether the response ends with it), of a whole answer or a segment. Where the response goes on,
    the finish reason is ABORT: so far it is a partial response.

    Raises:
        StreamedError: the server says that the request failed.
        ValueError, KeyError: not an answer of /generate, or one that contradicts itself.
    """
    answer = _ANSWER.decode(content)
    if answer.error is not None:
        raise StreamedError(answer.error.code, answer.error.message)
    meta = answer.meta_info
    if meta is None:
        raise KeyError("meta_info")
    aborted = meta.finish_reason is None or meta.finish_reason.type == "abort"
    drawn = meta.output_token_logprobs
    if drawn is None:
        # A request that is aborted before its first token has no log-probs at all.
        if not aborted:
            raise KeyError("output_token_logprobs")
        drawn = []
    ids = np.fromiter([token.id for token in drawn], np.int32, len(drawn))
    if not aborted and not _same_ids(answer.output_ids, ids):
        raise ValueError("output_ids and output_token_logprobs disagree")
    with np.errstate(over="ignore"):  # `check_reply` refuses what is infinite
        log_probs = np.fromiter([token.log_prob for token in drawn], np.float32, len(drawn))
    return make_reply(ids, log_probs, meta.finish_reason, meta.weight_version, meta.completion_tokens)


def make_reply(
    ids: np.ndarray, log_probs: np.ndarray, finish: Finish | None, version: str | int | None, total: int | None
) -> tuple[Reply, bool]:
    """(what was drawn, whether the response ends with it).

    Args:
        ids: int32 [T]
        log_probs: float32 [T]
        finish: None where the response goes on.
        version: the server's name of its weights.
        total: tokens of the whole response up to here.

    Raises:
        StreamedError: the server ended the request because it failed.
        ValueError, KeyError: an unknown finish reason, or one that no request of ours can have.
    """
    if finish is not None and finish.status_code is not None:
        raise StreamedError(finish.status_code, finish.message or "aborted")
    if finish is not None and isinstance(finish.matched, str):  # no request of ours names a text to stop at
        raise ValueError(f"the response was ended by {finish.matched!r}")
    reason = FinishReason.ABORT if finish is None else _REASONS[finish.type]
    label = None if version is None else str(version)
    reply = Reply(token_ids=ids, log_probs=log_probs, finish_reason=reason, weight_label=label, total=total)
    return reply, finish is not None


def only_new(segment: Reply, before: Sequence[Reply]) -> Reply:
    """The tokens of a segment that the segments before it do not hold.

    SGLang answers the abort of a waiting request with the whole response once more. A request that had begun waits
    again after it was retracted (others took its place because the KV cache was full).
    """
    if segment.total is None:
        return segment
    new = max(0, segment.total - sum(each.token_ids.size for each in before))
    repeated = max(0, segment.token_ids.size - new)
    return replace(segment, token_ids=segment.token_ids[repeated:], log_probs=segment.log_probs[repeated:])


def join_segments(segments: Sequence[Reply]) -> Reply:
    """The response so far, of at least one segment."""
    last = segments[-1]
    if len(segments) == 1:
        return last
    ids = np.concatenate([segment.token_ids for segment in segments])
    log_probs = np.concatenate([segment.log_probs for segment in segments])
    return replace(last, token_ids=ids, log_probs=log_probs, total=None)


def check_reply(reply: Reply, *, asked: int, vocab_size: int) -> None:
    """Refuses what would break the servers and the trainer that read the tokens next.

    Args:
        asked: the most tokens that were asked for.
        vocab_size: rows of the model's embedding.

    Raises:
        ValueError: tokens outside the vocabulary, more than were asked for, none at all in a response that is said to
            be complete, or log-probs that no probability has.
    """
    ids, log_probs = reply.token_ids, reply.log_probs
    if ids.size > asked:
        raise ValueError(f"{ids.size} tokens where {asked} were asked for")
    if ids.size == 0 and reply.finish_reason is not FinishReason.ABORT:
        raise ValueError(f"no token, and yet ended by {reply.finish_reason.value!r}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"token ids {ids.min()} .. {ids.max()}, with a vocabulary of {vocab_size}")
    if not (np.isfinite(log_probs) & (log_probs <= _ROUNDING)).all():
        raise ValueError("log-probs that are not finite, or above 0")


def _same_ids(output_ids: msgspec.Raw, ids: np.ndarray) -> bool:
    """Whether the JSON is these ids, or null."""
    written = bytes(output_ids)
    if written in (b"null", orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)):
        return True
    return bool(msgspec.json.decode(written, type=list[int]) == ids.tolist())  # for example with spaces between ids
