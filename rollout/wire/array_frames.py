"""Responses of /generate as arrays: frames of bytes in place of JSON, from a server of our own launcher.

JSON takes about 40 bytes for a token and its log-prob, and every number has to be parsed. A frame takes 8 bytes, which
are read as an array without parsing. A client asks for frames in the header `Accept`; a server that has none answers in
JSON.

A body is a sequence of frames. Each is a length (4 bytes, little-endian) and a `Segment` in MessagePack of that length.
The last frame has a finish reason or an error.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rollout.wire.reply import Finish, Reply, StreamedError, make_reply

MEDIA_TYPE = "application/vnd.megatron-dapo.segments"

LENGTH_BYTES = 4
TOKEN_ID, LOG_PROB = np.dtype("<i4"), np.dtype("<f4")
LONGEST_FRAME = 1 << 28
"""Bytes, for 32 million tokens. A larger number is no length: the body holds no frames."""


class Segment(msgspec.Struct, gc=False):
    """What was drawn since the segment before."""

    token_ids: bytes = b""
    """int32 [T], little-endian"""
    log_probs: bytes = b""
    """float32 [T], little-endian"""
    finish: Finish | None = None
    """Of the last segment alone."""
    weight_version: str | None = None
    total: int | None = None
    """Tokens of the whole response so far."""
    error: str | None = None
    """Why there is no segment."""
    code: int = 0
    """HTTP status of the error; the answer itself began with 200."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Segment)


def frame(segment: Segment) -> bytes:
    """The bytes that are sent."""
    content = _ENCODER.encode(segment)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def segment_of(answer: Mapping[str, Any]) -> Segment:
    """Packs one of the dicts that SGLang's tokenizer manager yields, and would send as JSON.

    Raises:
        ValueError, KeyError, TypeError: it has no token ids or log-probs, or they contradict each other.
    """
    meta = answer["meta_info"]
    finish = None if meta["finish_reason"] is None else msgspec.convert(meta["finish_reason"], Finish)
    drawn = meta.get("output_token_logprobs")
    if drawn is None:  # aborted before the first token
        if finish is None or finish.type != "abort":
            raise KeyError("output_token_logprobs")
        drawn = []
    ids = [entry[1] for entry in drawn]
    said = answer.get("output_ids")
    if (finish is None or finish.type != "abort") and said is not None and said != ids:
        raise ValueError("output_ids and output_token_logprobs disagree")
    version = meta.get("weight_version")
    return Segment(
        token_ids=np.array(ids, TOKEN_ID).tobytes(),
        log_probs=np.array([entry[0] for entry in drawn], LOG_PROB).tobytes(),
        finish=finish,
        weight_version=None if version is None else str(version),
        total=meta.get("completion_tokens"),
    )


async def frames(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The content of each frame up to the end of the body. One that the end of the connection cuts off is left out.

    Raises:
        ValueError: the body holds no frames.
    """
    try:
        while True:
            length = int.from_bytes(await content.readexactly(LENGTH_BYTES), "little")
            if length > LONGEST_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            yield await content.readexactly(length)
    except asyncio.IncompleteReadError:
        return


def read_frame(content: bytes) -> tuple[Reply, bool]:
    """As `rollout.wire.reply.read_part`; the arrays are views of `content`."""
    segment = _DECODER.decode(content)
    if segment.error is not None:
        raise StreamedError(segment.code, segment.error)
    ids, log_probs = np.frombuffer(segment.token_ids, TOKEN_ID), np.frombuffer(segment.log_probs, LOG_PROB)
    if ids.size != log_probs.size:
        raise ValueError(f"{ids.size} tokens with {log_probs.size} log-probs")
    return make_reply(ids, log_probs, segment.finish, segment.weight_version, segment.total)
