"""The server's side of the frames of `rollout.wire.reply`: SGLang's own HTTP server learns a second media type.

It is ASGI middleware, added from outside. A client that does not ask for frames gets SGLang's own answer. So does every
client of a server with several tokenizer workers: they are other processes, without this middleware.
"""

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from fastapi import HTTPException
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.wire.reply import MEDIA_TYPE, Segment, frame, segment_of

_LOG = logging.getLogger(__name__)
_ACCEPT = (b"accept", MEDIA_TYPE.encode())


def add() -> None:
    """Call it before SGLang's server starts in this process. The server's API key protects these answers too."""
    from sglang.srt.entrypoints.http_server import app, get_global_state
    from sglang.srt.managers.io_struct import GenerateReqInput

    app.add_middleware(PackedAnswers, asked=GenerateReqInput, manager=lambda: get_global_state().tokenizer_manager)


class PackedAnswers:
    """Answers POST /generate in frames where the header `Accept` names them; passes on everything else."""

    def __init__(self, app: ASGIApp, *, asked: type, manager: Callable[[], Any]) -> None:
        """
        Args:
            app: answers everything else.
            asked: SGLang's `GenerateReqInput`.
            manager: returns SGLang's tokenizer manager, once the server serves.
        """
        self.app = app
        self._read: Callable[[Any], Any] = TypeAdapter(asked).validate_python
        self._manager = manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["type"] == "http" and (scope["method"], scope["path"]) == ("POST", "/generate")
        if asked and _ACCEPT in scope["headers"]:
            response = await self._answer(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        try:
            asked = self._read(orjson.loads(await request.body()))
        except ClientDisconnect:
            return Response(status_code=499)
        except (ValidationError, ValueError) as error:
            return PlainTextResponse(f"not a request of /generate: {error}", status_code=400)
        manager = self._manager()
        # As in SGLang's own route for streams: if the client goes away before the end, its request is aborted.
        abort = manager.create_abort_task(asked)
        return StreamingResponse(_frames(manager, asked, request), media_type=MEDIA_TYPE, background=abort)


async def _frames(manager: Any, asked: Any, request: Request) -> AsyncIterator[bytes]:
    try:
        async for answer in manager.generate_request(asked, request):
            yield _packed(answer)
    except HTTPException as error:
        yield _failure(str(error.detail), error.status_code)
    except ValueError as error:
        if not await request.is_disconnected():
            yield _failure(str(error), getattr(error, "status_code", 400))


def _packed(answer: dict[str, Any]) -> bytes:
    """An answer that cannot be packed is the server's failure, not the request's fault."""
    try:
        return frame(segment_of(answer))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        return _failure(f"cannot pack the answer: {type(error).__name__}: {error}", 500)


def _failure(words: str, code: int) -> bytes:
    _LOG.error("request failed: %d: %s", code, words)
    return frame(Segment(error=words, code=code))
