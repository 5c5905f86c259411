"""What a server answers to /generate, from bytes to arrays: whole or in segments, in JSON or in frames.

At the paper's size a rollout step brings about 10^8 numbers. None of them becomes a long-lived Python object.

SGLang answers in JSON, and in server-sent events where it streams: about 40 bytes for a token and its log-prob, and
every number has to be parsed. A server of our own launcher can answer in frames (`rollout.wire.array_frames_server`): 8
bytes a token, which are read as arrays without parsing. A client asks for them in the header `Accept`. Such a body is a
sequence of frames, each a length (4 bytes, little-endian) and a `Segment` in MessagePack of that length. The last one
has a finish reason or an error.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rollout.generation import FinishReason, RoutingShape

MEDIA_TYPE = "application/vnd.megatron-dapo.segments"
"""Of frames."""

LENGTH_BYTES = 4
TOKEN_ID, LOG_PROB = np.dtype("<i4"), np.dtype("<f4")
LONGEST_FRAME = 1 << 28
"""Bytes, for 32 million tokens. A larger number is no length: the body holds no frames."""

_ROUNDING = 1e-3
"""Nats by which rounding may lift the log-prob of a certain token above 0."""

_EVENT, _LAST_EVENT = b"data: ", b"data: [DONE]\n"


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
    cached_tokens: int | None = None
    """Of the prompt, found in the server's prefix cache."""
    retractions: int | None = None
    """How often the response had to wait again because the KV cache was full."""
    routing: np.ndarray | None = None
    """uint8, flat: the experts of each token from the first one asked for to the last but one, layer after layer. Only
    a server that ends a response it was running sends them."""


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


class _Told(msgspec.Struct, gc=False):
    """What a server says of a response besides its tokens, under SGLang's names."""

    weight_version: str | int | None = None
    total: int | None = msgspec.field(default=None, name="completion_tokens")
    """Tokens of the whole response so far."""
    cached_tokens: int | None = None
    retractions: int | None = msgspec.field(default=None, name="num_retractions")


class Segment(_Told, gc=False):
    """What was drawn since the segment before."""

    token_ids: bytes = b""
    """int32 [T], little-endian"""
    log_probs: bytes = b""
    """float32 [T], little-endian"""
    finish: Finish | None = None
    """Of the last segment alone."""
    error: str | None = None
    """Why there is no segment."""
    code: int = 0
    """HTTP status of the error; the answer itself began with 200."""
    routing: bytes | None = None
    """uint8, as `Reply.routing`."""


class _Meta(_Told, kw_only=True):
    """Every version sends `finish_reason` and `output_token_logprobs`; all else is optional."""

    finish_reason: Finish | None
    """None in a segment that is not the last one."""
    output_token_logprobs: list[_Token] | None = None
    routed_experts: bytes | None = None
    """int32, in base64 as text."""


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Answer(msgspec.Struct):
    """One of the dicts that SGLang's tokenizer manager yields, and sends as JSON."""

    meta_info: _Meta | None = None
    output_ids: list[int] | None = None
    error: _Error | None = None


_ANSWER = msgspec.json.Decoder(_Answer)
_ENCODER = msgspec.msgpack.Encoder()
_SEGMENT = msgspec.msgpack.Decoder(Segment)


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event, one line each, up to the end of the stream, without the last one's "[DONE]".

    A line that the end of the connection cuts off is left out.
    """
    async for line in content:
        if line.startswith(_EVENT) and line.endswith(b"\n") and line != _LAST_EVENT:
            yield line[len(_EVENT) :]


async def frames(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The content of each frame up to the end of the body. One that the end of the connection cuts off is left out."""
    with suppress(asyncio.IncompleteReadError):
        while True:
            length = int.from_bytes(await content.readexactly(LENGTH_BYTES), "little")
            if length > LONGEST_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            yield await content.readexactly(length)


def frame(segment: Segment) -> bytes:
    """The bytes that are sent."""
    content = _ENCODER.encode(segment)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def segment_of(answer: Mapping[str, Any]) -> Segment:
    """Packs one of the dicts that SGLang's tokenizer manager yields.

    Raises:
        ValueError, KeyError, OverflowError: it has no token ids or log-probs, or they contradict each other.
    """
    return _segment(msgspec.convert(answer, _Answer))


def read_part(content: bytes) -> tuple[Reply, bool]:
    """(what was drawn, whether the response ends with it), of a whole answer or a segment in JSON. Where the response
    goes on, the finish reason is ABORT: so far it is a partial response.

    Raises:
        StreamedError: the server says that the request failed.
        ValueError, KeyError: not an answer of /generate, or one that contradicts itself.
    """
    return _reply(_segment(_ANSWER.decode(content)))


def read_frame(content: bytes) -> tuple[Reply, bool]:
    """As `read_part`; the arrays are views of `content`."""
    return _reply(_SEGMENT.decode(content))


async def read_parts(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[Reply, bool]]:
    """An answer, part by part as `read_part`, in whatever way it was sent; one that is not streamed has one part."""
    if response.content_type == MEDIA_TYPE:
        async for content in frames(response.content):
            yield read_frame(content)
    elif response.content_type == "text/event-stream":
        async for content in events(response.content):
            yield read_part(content)
    else:
        yield read_part(await response.read())


def _segment(answer: _Answer) -> Segment:
    if answer.error is not None:
        return Segment(error=answer.error.message, code=answer.error.code)
    meta = answer.meta_info
    if meta is None:
        raise KeyError("meta_info")
    aborted = meta.finish_reason is None or meta.finish_reason.type == "abort"
    # A request that is aborted before its first token has no log-probs at all.
    if meta.output_token_logprobs is None and not aborted:
        raise KeyError("output_token_logprobs")
    drawn = meta.output_token_logprobs or []
    ids = [token.id for token in drawn]
    if not aborted and answer.output_ids not in (None, ids):
        raise ValueError("output_ids and output_token_logprobs disagree")
    with np.errstate(over="ignore"):  # `check_reply` refuses what is infinite
        log_probs = np.array([token.log_prob for token in drawn], LOG_PROB)
    return Segment(
        token_ids=np.array(ids, TOKEN_ID).tobytes(),
        log_probs=log_probs.tobytes(),
        finish=meta.finish_reason,
        routing=None if meta.routed_experts is None else _as_bytes(meta.routed_experts),
        **{name: getattr(meta, name) for name in _Told.__struct_fields__},
    )


def _as_bytes(routed_experts: bytes) -> bytes:
    """uint8 of int32."""
    experts = np.frombuffer(routed_experts, TOKEN_ID)
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) <= 255:
        raise ValueError(f"routed_experts {experts.min()} .. {experts.max()}, where only 0 .. 255 are understood")
    return experts.astype(np.uint8).tobytes()


def _reply(segment: Segment) -> tuple[Reply, bool]:
    """
    Raises:
        StreamedError: the server ended the request because it failed.
        ValueError: an unknown finish reason, one that no request of ours can have, or tokens without log-probs.
    """
    if segment.error is not None:
        raise StreamedError(segment.code, segment.error)
    ids, log_probs = np.frombuffer(segment.token_ids, TOKEN_ID), np.frombuffer(segment.log_probs, LOG_PROB)
    if ids.size != log_probs.size:
        raise ValueError(f"{ids.size} tokens with {log_probs.size} log-probs")
    finish = segment.finish
    if finish is not None and finish.status_code is not None:
        raise StreamedError(finish.status_code, finish.message or "aborted")
    if finish is not None and isinstance(finish.matched, str):  # no request of ours names a text to stop at
        raise ValueError(f"the response was ended by {finish.matched!r}")
    reason = FinishReason.ABORT if finish is None else FinishReason(finish.type)
    reply = Reply(
        token_ids=ids,
        log_probs=log_probs,
        finish_reason=reason,
        weight_label=None if segment.weight_version is None else str(segment.weight_version),
        total=segment.total,
        cached_tokens=segment.cached_tokens,
        retractions=segment.retractions,
        routing=None if segment.routing is None else np.frombuffer(segment.routing, np.uint8),
    )
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
    if ids.size == 0 < asked and reply.finish_reason is not FinishReason.ABORT:
        raise ValueError(f"no token, and yet ended by {reply.finish_reason.value!r}")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"token ids {ids.min()} .. {ids.max()}, with a vocabulary of {vocab_size}")
    if not (np.isfinite(log_probs) & (log_probs <= _ROUNDING)).all():
        raise ValueError("log-probs that are not finite, or above 0 (is a weight of the model not finite?)")


def routing_of(reply: Reply, shape: RoutingShape, request_id: str, first: int, tokens: int) -> np.ndarray | None:
    """uint8 [tokens - 1 - first, layers, top_k] of a reply; None: it has none and may yet, as it did not end by itself.

    Args:
        first: token from which rows were asked for, counted from the prompt's first one.
        tokens: of the prompt and of all that stands behind it.

    Raises:
        ValueError: too few or too many rows, an expert that the model has not, or one twice; names response and token.
    """
    found, numbers = reply.routing, (tokens - 1 - first) * shape.layers * shape.top_k
    if found is None and reply.finish_reason is FinishReason.ABORT:
        return None
    if found is None or found.size != numbers:
        there = 0 if found is None else found.size
        wanted = f"{numbers}, {shape.top_k} in each of {shape.layers} layers"
        raise ValueError(f"response {request_id}, tokens {first} to {tokens - 2}: {there} experts in place of {wanted}")
    rows = found.reshape(-1, shape.layers, shape.top_k)
    chosen = np.ascontiguousarray(np.moveaxis(rows, 2, 0))
    wrong = (chosen >= shape.experts).any(0)
    for at in range(1, shape.top_k):  # far faster than to sort each row
        wrong |= (chosen[:at] == chosen[at]).any(0)
    if wrong.any():
        row, layer = np.argwhere(wrong)[0].tolist()
        told = f"response {request_id}, token {first + row}, layer {layer}: experts {rows[row, layer].tolist()}"
        raise ValueError(f"{told}, where {shape.top_k} different ones of 0 .. {shape.experts - 1} belong")
    return rows
