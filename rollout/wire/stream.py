"""A response that a server passes on in segments (server-sent events), so that what it drew outlives it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import aiohttp
import msgspec
import numpy as np

from rollout.wire.reply import Reply, StreamedError, read_part

_MARK, _END = b"data: ", b"\n\n"
_DONE = b"[DONE]"


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 500


class _Problem(msgspec.Struct):
    error: _Error


_PROBLEM = msgspec.json.Decoder(_Problem)


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event up to the end of the stream, without the last one's "[DONE]".

    A segment may be longer than aiohttp reads at once; an event that the connection's end cuts off is left out.
    """
    buffer = bytearray()
    async for chunk in content.iter_any():
        searched = max(len(buffer) - len(_END) + 1, 0)
        buffer += chunk
        while (end := buffer.find(_END, searched)) >= 0:
            begin = len(_MARK) if buffer.startswith(_MARK) else 0
            with memoryview(buffer) as view:
                data = bytes(view[begin:end])  # of the ten kilobytes of a segment the only copy
            del buffer[: end + len(_END)]
            searched = 0
            if data != _DONE:
                yield data


def read_segment(content: bytes) -> tuple[Reply, bool]:
    """(what was drawn since the segment before, whether the response ends with it).

    The finish reason of a segment that is not the last one is ABORT: that far it is a partial response.

    Raises:
        StreamedError: the server says that the request failed.
        ValueError, KeyError: not a segment, or one that contradicts itself.
    """
    if content.startswith(b'{"error"'):
        error = _PROBLEM.decode(content).error
        raise StreamedError(error.code, error.message)
    return read_part(content)


def only_new(segment: Reply, before: Sequence[Reply]) -> Reply:
    """What of a segment the ones before it do not hold.

    SGLang answers the abort of a request that waits with the whole response once more; one that had begun waits again
    where its place was taken for others (its KV cache was full).
    """
    if segment.total is None:
        return segment
    new = max(0, segment.total - sum(each.token_ids.size for each in before))
    repeated = max(0, segment.token_ids.size - new)
    return replace(segment, token_ids=segment.token_ids[repeated:], log_probs=segment.log_probs[repeated:])


def join_segments(segments: Sequence[Reply]) -> Reply:
    """The response so far: at least one segment."""
    last = segments[-1]
    if len(segments) == 1:
        return last
    return Reply(
        token_ids=np.concatenate([segment.token_ids for segment in segments]),
        log_probs=np.concatenate([segment.log_probs for segment in segments]),
        finish_reason=last.finish_reason,
        weight_label=last.weight_label,
    )
