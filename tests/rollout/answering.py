"""How a stand-in answers one request of /generate: whole or in segments, in JSON or in frames."""

from collections.abc import Callable

import orjson
from aiohttp import web

from rollout.wire.reply import MEDIA_TYPE, frame, segment_of


class Answer:
    """The HTTP side of one response. What is sent has been written by `content` or by whoever knows `packed`."""

    def __init__(self, *, packed: bool, streamed: bool, spoil: Callable[[], bytes | None], breaks_off: bool) -> None:
        self.packed, self.streamed = packed, streamed
        self._spoil, self._breaks_off = spoil, breaks_off
        self._response: web.StreamResponse | None = None

    async def begin(self, request: web.Request) -> None:
        """Sends the head of a streamed answer."""
        if self.streamed:
            kind = MEDIA_TYPE if self.packed else "text/event-stream"
            self._response = web.StreamResponse(headers={"Content-Type": kind})
            await self._response.prepare(request)

    def content(
        self, drawn: list[list], reason: dict | None, label: str, total: int, experts: str | None = None
    ) -> bytes:
        """A segment of entries [log-prob, id, text]; `total`: tokens of the response up to its end; `experts`: int32 in
        base64."""
        meta = {
            "finish_reason": reason,
            "output_token_logprobs": drawn,
            "weight_version": label,
            "completion_tokens": total,
            "cached_tokens": 3,
            "num_retractions": 2,
        }
        meta |= {} if experts is None else {"routed_experts": experts}
        answer = {"output_ids": [entry[1] for entry in drawn], "meta_info": meta}
        return frame(segment_of(answer)) if self.packed else orjson.dumps(answer)

    async def part(self, content: bytes) -> None:
        """Sends a segment."""
        assert self._response is not None
        spoilt = self._spoil()
        content = content if spoilt is None else spoilt
        await self._response.write(content if self.packed else b"data: " + content + b"\n\n")
        if spoilt is not None and self._breaks_off:
            raise ConnectionResetError("scripted")

    async def end(self, content: bytes) -> web.StreamResponse:
        """Sends the last segment, or the whole response."""
        if self._response is None:
            return web.Response(body=content, content_type=MEDIA_TYPE if self.packed else "application/json")
        await self.part(content)
        if not self.packed:
            await self._response.write(b"data: [DONE]\n\n")
        return self._response
