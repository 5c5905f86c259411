"""A server's side of frames, without SGLang: its tokenizer manager is scripted."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest
from fastapi import HTTPException
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rollout.generation import FinishReason
from rollout.wire.array_frames_server import PackedAnswers
from rollout.wire.reply import LENGTH_BYTES, MEDIA_TYPE, Reply, StreamedError, read_frame, segment_of


@dataclass
class Asked:
    """In the place of `GenerateReqInput`."""

    rid: str
    input_ids: list[int] = field(default_factory=list)
    stream: bool = False


class Manager:
    """Yields the answers, and raises those that are errors."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked, self.ended = answers, list[Asked](), list[str]()

    async def generate_request(self, asked: Asked, request: object) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(asked)
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def create_abort_task(self, asked: Asked) -> BackgroundTask:
        return BackgroundTask(self.ended.append, asked.rid)


def answer(ids: list[int], reason: dict | None, **more: object) -> dict[str, Any]:
    meta = {"finish_reason": reason, "output_token_logprobs": [(-0.5, token, None) for token in ids], **more}
    return {"output_ids": ids, "meta_info": meta}


def call(manager: Manager, method: str, path: str, body: bytes = b"", accept: str = MEDIA_TYPE) -> httpx.Response:
    async def own(request: object) -> PlainTextResponse:
        return PlainTextResponse("SGLang's own answer")

    app = Starlette(routes=[Route("/generate", own, methods=["POST", "PUT"]), Route("/health", own)])
    packed = PackedAnswers(app, asked=Asked, manager=lambda: manager)

    async def work() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(packed), base_url="http://server") as client:
            return await client.request(method, path, content=body, headers={"Accept": accept})

    return asyncio.run(work())


def ask(manager: Manager, body: bytes = b'{"rid":"r","input_ids":[1,2],"stream":true}') -> list[bytes]:
    response = call(manager, "POST", "/generate", body)
    assert (response.status_code, response.headers["content-type"]) == (200, MEDIA_TYPE)
    frames, content = [], response.content
    while content:
        end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
        frames.append(content[LENGTH_BYTES:end])
        content = content[end:]
    return frames


def test_each_answer_of_the_manager_is_a_frame() -> None:
    manager = Manager(
        answer([5], None, weight_version="3", completion_tokens=1),
        answer([6, 7], {"type": "stop", "matched": 7}, weight_version="3", completion_tokens=3),
    )
    (first, goes_on), (last, ends) = map(read_frame, ask(manager))
    assert (goes_on, ends) == (False, True)
    assert (first.token_ids.tolist(), first.log_probs.tolist(), first.total) == ([5], [-0.5], 1)
    assert (last.token_ids.tolist(), last.weight_label, last.total) == ([6, 7], "3", 3)
    assert (first.finish_reason, last.finish_reason) == (FinishReason.ABORT, FinishReason.STOP)
    assert manager.asked == [Asked("r", [1, 2], True)]
    assert manager.ended == ["r"]


@pytest.mark.parametrize(
    ("fails_with", "code"),
    [
        (ValueError("longer than the context"), 400),
        (HTTPException(503, "no room"), 503),
        (answer([5], {"type": "abort", "message": "no memory", "status_code": 500}), 500),
        (answer([5], {"type": "tired"}) | {"output_ids": [6]}, 500),  # contradicts itself: not the request's fault
        ({"output_ids": [], "meta_info": {"finish_reason": {"type": "stop"}}}, 500),
        ({"output_ids": []}, 500),
    ],
)
def test_what_fails_in_the_middle_is_the_last_frame(fails_with: object, code: int) -> None:
    first, last = ask(Manager(answer([5], None), fails_with))
    assert read_frame(first)[0].token_ids.tolist() == [5]
    with pytest.raises(StreamedError) as caught:
        read_frame(last)
    assert caught.value.status == code


def test_who_does_not_ask_for_frames_gets_what_sglang_answers() -> None:
    for method, path, accept in (
        ("POST", "/generate", "*/*"),
        ("PUT", "/generate", MEDIA_TYPE),
        ("GET", "/health", ""),
    ):
        assert call(Manager(), method, path, b"{}", accept).text == "SGLang's own answer"


@pytest.mark.parametrize(
    "body", [b"{not json", b"[]", orjson.dumps({"input_ids": [1]}), b'{"rid":"r","input_ids":"x"}']
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    response = call(Manager(), "POST", "/generate", body)
    assert response.status_code == 400
    assert "not a request of /generate" in response.text


def test_an_abort_before_the_first_token_is_empty() -> None:
    segment = segment_of({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort"}}})
    assert (segment.token_ids, segment.log_probs) == (b"", b"")
    reply: Reply = read_frame(ask(Manager({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}))[0])[0]
    assert reply.finish_reason is FinishReason.ABORT
