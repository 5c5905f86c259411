"""The server's side of `rollout.packed`: SGLang's application, that of its own HTTP server, learns a second media type.

It is added from outside, as any ASGI middleware, to the application that SGLang's module offers; who does not ask for
frames gets SGLang's own answer.
"""

from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException
from pydantic import TypeAdapter, ValidationError
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.managers.io_struct import GenerateReqInput
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.packed import MEDIA_TYPE, Segment, frame, segment_of

_REQUEST = TypeAdapter(GenerateReqInput)
_ACCEPT = (b"accept", MEDIA_TYPE.encode())


def add_to(app: FastAPI) -> None:
    """Call it before the application serves. An API key that is asked for later is asked for here too."""
    app.add_middleware(PackedAnswers)


class PackedAnswers:
    """Answers POST /generate in frames where the header `Accept` names them; hands on everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/generate" and _ACCEPT in scope["headers"]:
            response = await _answer(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)


async def _answer(request: Request) -> Response:
    try:
        asked = _REQUEST.validate_python(orjson.loads(await request.body()))
    except (ValidationError, ValueError) as error:
        return PlainTextResponse(f"not a request of /generate: {error}", status_code=400)
    manager = get_global_state().tokenizer_manager
    # As SGLang's own route does: who goes away before the end, has the request aborted.
    return StreamingResponse(
        _frames(manager, asked, request), media_type=MEDIA_TYPE, background=manager.create_abort_task(asked)
    )


async def _frames(manager: Any, asked: GenerateReqInput, request: Request) -> AsyncIterator[bytes]:
    try:
        async for answer in manager.generate_request(asked, request):
            yield frame(segment_of(answer))
    except HTTPException as error:
        yield frame(Segment(error=str(error.detail), code=error.status_code))
    except ValueError as error:
        if not await request.is_disconnected():
            yield frame(Segment(error=str(error), code=getattr(error, "status_code", 400)))
