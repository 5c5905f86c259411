"""A scripted server with SGLang's HTTP interface, and an Engine around it. No model: the answers are recognisable.

Token j of an answer is `10 * version + j % 10` with log-prob `-version`, so that a test can read off every token which
weights drew it and at which position.
"""

import asyncio
import base64
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from aiohttp import web

from rollout.generation import RoutingShape
from rollout.weights.checksums import expected_checksums
from rollout.wire.client import ServerInfo
from rollout.wire.reply import MEDIA_TYPE
from tests.rollout.answering import Answer

INFO = ServerInfo(device="cpu", dtype="float32", tensor_parallel=1)
BACKLOG = 2048
"""Connections that may wait to be accepted, as a real server's (uvicorn). Where fewer may, the kernel drops those of a
burst, and a client that believes itself connected repeats its request for minutes."""


LINGERS_S = 0.02
"""An ended request stays in the scheduler after its answer, as one of an overlapped batch; a pause keeps it there."""


SHAPE = RoutingShape(layers=3, top_k=2, experts=6)
"""Of the mixture of experts that a stand-in says it is."""


def experts_at(places: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """[n, layers, k]: where a stand-in of each version sends the token at each place of prompt and response."""
    first = (places[:, None] + np.arange(SHAPE.layers) + 2 * versions[:, None]) % SHAPE.experts
    return np.stack([first, (first + 1 + versions[:, None] % 5) % SHAPE.experts], axis=-1)


MEMORY = ["kv_cache", "weights", "cuda_graph"]


class StandIn:
    """Engine: the server runs in the test's own event loop."""

    spoils_experts: Callable[[np.ndarray], np.ndarray] | None = None
    """What it makes of the experts before it sends them."""
    draft: Mapping[str, str] = {}
    """Checksums of a draft model's tensors; one of a name of the model's own is the model's."""
    ends: Callable[[int], bool] = staticmethod(lambda position: False)
    """Whether a response ends with the token at this position of prompt and response, as at a stop token."""
    load: tuple[float, int] | None = None
    """Share of its KV cache in use and requests that wait, as /v1/loads tells; None: it knows no such route."""

    def __init__(self, *, seconds_a_token: float = 0.0, weights: Path | None = None) -> None:
        self.ours = True
        self.seconds_a_token = seconds_a_token
        self.loaded: Path | None = weights
        self.label, self.model = "0", "model"
        self.starts = 0
        self.closed = False
        self.healthy = True
        self.scheduler_answers = True
        self.fails: Callable[[int], int | None] = lambda number: None
        """Number of the /generate call -> HTTP status to answer with, if any."""
        self.hangs = False
        self.start_fails = False
        self.dies_at_starts = 0
        """How many of the next starts end in its death."""
        self.may_start = asyncio.Event()
        """Cleared by a test: a start waits for it."""
        self.may_start.set()
        self.corrupt: str | None = None
        """Name of a tensor whose checksum is reported wrong."""
        self.says: dict[str, object] = {}  # /server_info answers this too
        self.newer_checker = False
        """Answers /weights_checker in the shape of 0.5.23."""
        self.refuse_updates = self.die_on_update = False
        self.slow_updates = 0.0
        self.calls: list[str] = []
        self.prompts: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.cache_keys: list[str | None] = []
        self.groups, self.aborted_single = list[str](), list[str]()
        self.stream_interval: int | None = None
        """Tokens of a segment; None: a server that cannot stream without repeating itself."""
        self.packs = True
        """Whether it answers in frames who asks for them, as a server of ours; else in JSON, as SGLang itself."""
        self.spoils: Callable[[int], bytes | None] = lambda number: None
        """Number of the segment, over all streams -> what is sent in its place, if anything."""
        self.repeats_itself = False
        """Whether it answers an abort with all tokens of the response, as a real server for one that it retracted."""
        self.packed_answers = 0
        self.breaks_off = False
        """Whether a connection ends behind what is sent in a segment's place."""
        self.segments = 0
        self.running: dict[str, asyncio.Event] = {}
        self.most_running = 0
        self.paused = False
        self.released: frozenset[str] = frozenset()
        """The parts of its memory that it is out of."""
        self.hangs_on_release = False
        self._runner: web.AppRunner | None = None
        self._port = 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def version(self) -> int:
        return int(self.label)

    async def start(self) -> None:
        self.starts += 1
        if self.start_fails:
            return
        if self.dies_at_starts:
            self.dies_at_starts -= 1
            return
        await self.may_start.wait()
        self.released = frozenset()
        self._leaving: set[asyncio.Task[None]] = set()
        self.label, self.loaded, self.paused, self.hangs, self.healthy = "0", None, False, False, True
        self.scheduler_answers = True
        app = web.Application()
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=BACKLOG)
        await site.start()
        self._port = self._runner.addresses[0][1]

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/server_info", self._info),
            web.get("/model_info", self._model_info),
            web.get("/v1/loads", self._loads),
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._resume),
            web.post("/flush_cache", self._flush),
            web.post("/update_weights_from_disk", self._update),
            web.post("/weights_checker", self._checksums),
            web.post("/release_memory_occupation", self._release_memory),
            web.post("/resume_memory_occupation", self._resume_memory),
        ]

    def alive(self) -> bool:
        return self._runner is not None

    def log_tail(self) -> str:
        return f"last words of {self.url}"

    async def restart(self, weights: tuple[Path, str] | None = None) -> None:
        await self.die()
        await self.start()
        if weights is not None:
            self.loaded, self.label = weights

    async def close(self) -> None:
        self.closed = True
        await self.die()

    async def die(self) -> None:
        """As `kill -9`: connections break without an answer."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for event in self.running.values():
                event.set()
            for connection in list(runner.server.connections):  # type: ignore[union-attr]
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        if not self.healthy:
            await asyncio.sleep(60)
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        if not self.scheduler_answers:
            await asyncio.sleep(60)
        memory = [{"memory_usage": {"weight": 1.5, "kvcache": 2.0}}]
        info = {"device": "cpu", "dtype": "float32", "tp_size": 1, "internal_states": memory}
        info["incremental_streaming_output"] = self.stream_interval is not None
        return web.json_response(info | self.says)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label, "model_path": str(self.loaded or self.model)})

    async def _loads(self, request: web.Request) -> web.Response:
        if self.load is None:
            return web.Response(status=404)
        core = {"dp_rank": 0, "token_usage": self.load[0], "num_waiting_reqs": self.load[1]}
        return web.json_response({"loads": [core]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert not self.released
        number = len(self.prompts)
        self.prompts.append(body["input_ids"])
        self.seeds.append(body["sampling_params"].get("sampling_seed"))
        self.cache_keys.append(body.get("extra_key"))
        self.calls.append(f"generate {self.label}")
        status = self.fails(number)
        if status == 200:
            return web.Response(body=b"{not json")
        if status is not None:
            return web.json_response({"error": {"message": "scripted"}}, status=status)
        if self.hangs:
            await asyncio.sleep(60)
        rid, wanted = body["rid"], body["sampling_params"]["max_new_tokens"]
        self.running[rid] = aborted = asyncio.Event()
        self.most_running = max(self.most_running, len(self.running))
        drawn: list[list] = []
        answer = await self._begin(request, body)
        sent = 0
        try:
            for position in range(len(body["input_ids"]), len(body["input_ids"]) + wanted):
                if aborted.is_set():
                    break
                drawn.append([-float(self.version), 10 * self.version + position % 10, None])
                if answer.streamed and len(drawn) - sent == self.stream_interval:
                    await answer.part(answer.content(drawn[sent:], None, self.label, len(drawn)))
                    sent = len(drawn)
                if self.ends(position):
                    break
                if self.seconds_a_token:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(aborted.wait(), self.seconds_a_token)
        finally:
            del self.running[rid]
            leaving = asyncio.ensure_future(self._linger())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        reason = {"type": "length", "length": wanted} if len(drawn) == wanted else {"type": "abort", "message": "Abort"}
        if reason["type"] == "abort" and drawn and self.ends(len(body["input_ids"]) + len(drawn) - 1):
            reason = {"type": "stop", "matched": drawn[-1][1]}
        retracted = reason["type"] == "abort" and self.repeats_itself
        sent, experts = 0 if retracted else sent, None
        if body.get("return_routed_experts") and not retracted:
            start, end = body["routed_experts_start_len"], len(body["input_ids"]) + len(drawn) - 1
            rows = experts_at(np.arange(start, end), np.full(end - start, self.version))
            rows = rows if self.spoils_experts is None else self.spoils_experts(rows)
            experts = base64.b64encode(rows.astype("<i4").tobytes()).decode()
        return await answer.end(answer.content(drawn[sent:], reason, self.label, len(drawn), experts))

    async def _begin(self, request: web.Request, body: dict) -> Answer:
        packed = self.packs and request.headers.get("Accept") == MEDIA_TYPE
        self.packed_answers += packed
        answer = Answer(packed=packed, streamed=bool(body["stream"]), spoil=self._spoil, breaks_off=self.breaks_off)
        await answer.begin(request)
        return answer

    def _spoil(self) -> bytes | None:
        self.segments += 1
        return self.spoils(self.segments - 1)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body.get("abort_all"):
            self.aborted_single.append(body["rid"])
        for rid, event in self.running.items():
            if body.get("abort_all") or rid == body.get("rid"):
                event.set()
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        self.calls.append("pause")
        self.paused = True
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.Response:
        self.calls.append("resume")
        self.paused = False
        return web.json_response({})

    async def _linger(self) -> None:
        await asyncio.sleep(LINGERS_S)
        while self.paused:
            await asyncio.sleep(0.005)

    async def _flush(self, request: web.Request) -> web.Response:
        self.calls.append("flush")
        deadline = time.monotonic() + float(request.query["timeout"])
        while self.running or self._leaving:
            if time.monotonic() > deadline:
                return web.Response(status=400)
            await asyncio.sleep(0.005)
        return web.Response()

    async def _release_memory(self, request: web.Request) -> web.Response:
        self.calls.append("release")
        assert not self.running, "a real scheduler ends here"
        if self.hangs_on_release:
            await asyncio.sleep(60)
        self.released = frozenset(MEMORY)
        return web.Response()

    async def _resume_memory(self, request: web.Request) -> web.Response:
        tags = (await request.json()).get("tags") or MEMORY
        self.calls.append("take back" if tags == MEMORY else f"take back {' '.join(tags)}")
        assert self.released.issuperset(tags), "SGLang's scheduler ends here"
        self.released = self.released.difference(tags)
        return web.Response()

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(f"update {body['weight_version']}")
        if self.die_on_update:
            self.die_on_update = False
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.die()))
            await asyncio.sleep(1)
        await asyncio.sleep(self.slow_updates)
        if self.refuse_updates:
            return web.json_response({"success": False, "message": "no such folder"}, status=400)
        assert self.paused
        assert not self.running
        self.loaded, self.label = Path(body["model_path"]), body["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def _checksums(self, request: web.Request) -> web.Response:
        assert self.loaded is not None
        assert "weights" not in self.released
        checksums = {}
        with suppress(ValueError):  # a real server has checksums of every model
            checksums = dict(expected_checksums(self.loaded, INFO)[0])
        checksums |= {f"draft.{name}": checksums.get(name, value) for name, value in self.draft.items()}
        if self.corrupt is not None:
            checksums[self.corrupt] = "0" * 16
        rank = {"tp_rank": 0}
        ranks = [{"parallelism_info": [rank] if self.newer_checker else rank, "checksums": checksums}]
        return web.json_response({"success": True, "ranks": ranks})
