"""SGLang's HTTP interface, as far as the fleet uses it: one client a server. Versions 0.5.17 to 0.5.23."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import numpy as np
import orjson

from rollout.errors import AccessDenied, RolloutError, ServerRefused, ServerUnavailable
from rollout.generation import SamplingParams
from rollout.weights import LOADER
from rollout.wire.reply import MEDIA_TYPE, Reply, StreamedError, join_segments, only_new, read_parts

KEEP_ALIVE_S = 2.0
"""The server closes idle connections after 5 s; a client that keeps them longer writes into a closing one."""

READ_AHEAD = 1 << 26
"""Bytes of an answer that may wait to be read. With aiohttp's own 64 KiB a long answer stalls its connection. A
server-sent event may be twice as long: 3 million tokens, or 60,000 with the experts of 48 layers."""

_ALTERING = ("quantization", "torchao_config", "enable_lora", "cpu_offload_gb")
_FORGETFUL = ("disable_radix_cache", "strip_thinking_cache", "enable_deterministic_inference")
_RETRY_LATER = (408, 425, 429, 499)  # 499: SGLang's, for a request that was aborted before it reached the scheduler
_UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
Source = Literal["disk", "tensor", "distributed"]
"""Where a server finds new weights, by the name of SGLang's route."""
_PLAIN = {"Content-Type": "application/json"}
_FRAMES = {**_PLAIN, "Accept": MEDIA_TYPE}
"""Always sent to /generate. A server that has no frames answers in JSON; the content type tells which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """What a server says of itself: ServerInfo(device="cpu", dtype="float32", tensor_parallel=1)"""

    device: str
    dtype: str
    """As given on its command line; "auto" follows the model's config."""
    tensor_parallel: int
    deterministic: bool = False
    """Whether the seeds of requests count."""
    fp32_head: bool = False
    """Whether its output layer's product is made in float32 whatever `dtype` is."""
    streams: bool = False
    """Whether it can stream a response in segments that do not repeat each other."""
    routed_experts: bool = False
    """Whether it can say which experts each token was sent to."""
    caches_responses: bool = True
    """Whether it finds the keys and values of a response that has ended again."""
    speculative: str = ""
    """SGLang's name of its speculative decoding, in small letters; empty: none."""
    quantized: bool = False
    """Whether it takes FP8 weights, by blocks."""
    takes_changes: bool = False
    """Whether it can be sent what changed of its weights alone."""
    altered: str = ""
    """SGLang's name of a setting (`quantization`) by which its weights differ from those it is given; empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLoad:
    """What a server is occupied with: ServerLoad(kv_use=0.83, waiting=12)"""

    kv_use: float
    """Share of its KV cache that running responses hold."""
    waiting: int
    """Requests that wait inside it for room."""


class SglangClient:
    """Calls to one server. Every call has a deadline, and ends in its result or one of two errors.

    Raises (all calls):
        ServerRefused: 4xx, the request itself is wrong.
        ServerUnavailable: no connection, no answer in time, 5xx, or an answer that cannot be read.
    """

    def __init__(
        self, url: str, *, request_deadline_s: float, control_deadline_s: float = 30.0, api_key: str | None = None
    ) -> None:
        """Made in the event loop that it is used in. `api_key`: for a server that asks for one."""
        self.url, self.request_deadline_s = url.rstrip("/"), request_deadline_s
        self.control_deadline_s = control_deadline_s
        # Neither a proxy from the environment nor cookies: servers are addressed directly.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            read_bufsize=READ_AHEAD,
            timeout=aiohttp.ClientTimeout(),
        )

    async def close(self) -> None:
        """Closes the connections. Running and later calls end in ServerUnavailable."""
        await self._session.close()

    async def generate(
        self,
        rid: str,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        *,
        seed: int | None = None,
        segments: list[Reply] | None = None,
        routed_from: int | None = None,
        cache_key: str | None = None,
    ) -> Reply:
        """Draws a response to int32 [P] ids. No `rid` may be a prefix of another one: aborts match by prefix.

        The caller keeps the request's deadline. After an abort at the deadline, `control_deadline_s` is left to get
        what was drawn.

        Args:
            segments: for a server that `streams`. Filled with the response's parts as they come, so that the caller has
                them if the server is lost. Emptied if one of them cannot be read.
            routed_from: token (at most P) from which the answer says each token's experts; None: it does not.
            cache_key: cached prefixes are used, and left, only among requests of one key.
        """
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": np.ascontiguousarray(prompt_ids),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1,
                "min_p": 0.0,
                "stop_token_ids": sampling.stop_token_ids,
                "logit_bias": {str(token): added for token, added in (sampling.logit_bias or {}).items()} or None,
                "sampling_seed": seed,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": segments is not None,
            "extra_key": cache_key,
        }
        if routed_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routed_from}
        received, complete = [] if segments is None else segments, False
        deadline_s = self.request_deadline_s + self.control_deadline_s
        async with self._answer("/generate", body, deadline_s, _FRAMES) as response:
            try:
                async for segment, ends in read_parts(response):
                    received.append(only_new(segment, received))
                    complete = ends
            except _UNREADABLE as error:
                received.clear()
                raise self._unreadable("/generate", error) from error
            except StreamedError as error:
                raise _error_for(error.status)(f"{self.url}/generate: {error.status}: {error}") from None
        if not complete:
            raise ServerUnavailable(f"{self.url}/generate: the answer stopped before the response's end")
        return join_segments(received)

    async def health(self, deadline_s: float, *, ours: bool = True) -> None:
        """Returns if a server of ours answers that it serves (a paused one does, one that still loads does not), or if
        the HTTP process of a server of others answers: its /health may draw a token."""
        await self._call("/health" if ours else "/model_info", None, deadline_s)

    async def server_info(self, deadline_s: float | None = None) -> ServerInfo:
        """Asks the server's scheduler too, so an answer shows that both processes are alive."""
        async with self.json("/server_info", None, deadline_s) as answer:
            return ServerInfo(
                device=answer["device"],
                dtype=answer["dtype"],
                tensor_parallel=answer["tp_size"],
                deterministic=bool(answer.get("enable_deterministic_inference", False)),
                fp32_head=bool(answer.get("enable_fp32_lm_head", False)),
                streams=bool(answer.get("incremental_streaming_output", False)),
                routed_experts=bool(answer.get("enable_return_routed_experts", False)),
                caches_responses=not any(map(answer.get, _FORGETFUL)),
                speculative=str(answer.get("speculative_algorithm") or "").lower(),
                quantized="quantization_config" in (answer.get("json_model_override_args") or ""),
                takes_changes=LOADER in (answer.get("custom_weight_loader") or ()),
                altered=next((name for name in _ALTERING if answer.get(name)), ""),
            )

    async def load(self, deadline_s: float) -> ServerLoad:
        """Answered by its HTTP process, from what the scheduler has left in shared memory after its last batch."""
        async with self.json("/v1/loads?include=core", None, deadline_s) as answer:
            ranks = answer["loads"]
            waiting = sum(int(rank["num_waiting_reqs"]) for rank in ranks)
            return ServerLoad(kv_use=max(float(rank["token_usage"]) for rank in ranks), waiting=waiting)

    async def weight_label(self, *, model: bool = False) -> str:
        """The server's name of its weights; "default" where a person started it, or with `model` the model's folder."""
        async with self.json("/model_info") as answer:
            return str(answer["model_path" if model and answer["weight_version"] == "default" else "weight_version"])

    async def abort(self, rid: str | None) -> None:
        """Ends the request with this id, or every request; each answers with what it has drawn so far."""
        await self._call("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def pause(self) -> None:
        """Stops drawing at once; running requests keep their state."""
        await self._call("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        """Goes on after `pause`."""
        await self._call("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Forgets all cached prefixes. Fails while a request runs, even one that nobody here waits for."""
        try:
            await self._call(f"/flush_cache?timeout={self.control_deadline_s / 2:g}", {})
        except AccessDenied:
            raise
        except ServerRefused as error:
            raise ServerUnavailable(f"a request still runs there: {error}") from error

    async def memory_gb(self) -> float:
        """GB (2**30 bytes) that weights and KV cache take on each of its accelerators, by its own account."""
        async with self.json("/server_info") as answer:
            usage = answer["internal_states"][0]["memory_usage"]
            return float(usage["weight"] + usage["kvcache"])

    async def release_memory(self, deadline_s: float) -> None:
        """Leaves its accelerators' memory. Its scheduler crashes on this call while a request runs."""
        await self._call("/release_memory_occupation", {}, deadline_s)

    async def resume_memory(self, deadline_s: float, parts: Sequence[str] | None = None) -> None:
        """Takes back what it left, weights included, or of it the `parts`, by SGLang's names."""
        await self._call("/resume_memory_occupation", {} if parts is None else {"tags": list(parts)}, deadline_s)

    async def update_weights(
        self, source: Source, body: Mapping[str, Any], label: str | None, deadline_s: float
    ) -> None:
        """Loads weights, all of them or a bucket.

        Args:
            source: where `body`, in the terms of SGLang's route of this name, says that they are.
            label: the new name of the weights, with the last bucket.
        """
        # A flush in this call would crash a server up to 0.5.21 that has requests: `flush_cache` comes after it.
        body = {**body, "weight_version": label, "flush_cache": False}
        await self._succeed(f"/update_weights_from_{source}", body, deadline_s)

    async def init_weights_update_group(self, group: Mapping[str, Any], deadline_s: float) -> None:
        """The server's ranks join a process group; returns when all have met.

        Args:
            group: master_address, master_port, rank_offset (rank of the server's first rank), world_size, group_name,
                backend.
        """
        await self._succeed("/init_weights_update_group", group, deadline_s)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        """The server's ranks leave it."""
        await self._succeed("/destroy_weights_update_group", {"group_name": group_name})

    async def checksums(self, deadline_s: float) -> dict[int, dict[str, str]]:
        """{tensor-parallel rank: {SGLang's name of the tensor: hash}}, computed now from the memory of the server."""
        async with self.json("/weights_checker", {"action": "checksum"}, deadline_s) as answer:
            return {_tensor_rank(rank["parallelism_info"]): rank["checksums"] for rank in answer["ranks"]}

    async def _succeed(self, path: str, body: Mapping[str, Any], deadline_s: float | None = None) -> None:
        async with self.json(path, body, deadline_s) as answer:
            if not answer.get("success"):
                raise ServerRefused(f"{self.url}{path}: {answer.get('message')}")

    @asynccontextmanager
    async def json(
        self, path: str, body: Mapping[str, Any] | None = None, deadline_s: float | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The JSON object of a 200 answer. What inside cannot be read of it becomes ServerUnavailable."""
        content = await self._call(path, body, deadline_s)
        try:
            yield orjson.loads(content)
        except _UNREADABLE as error:
            raise self._unreadable(path, error) from error

    async def _call(self, path: str, body: Mapping[str, Any] | None = None, deadline_s: float | None = None) -> bytes:
        """The body of a 200 answer."""
        async with self._answer(path, body, deadline_s) as response:
            return await response.read()

    def _unreadable(self, path: str, error: Exception) -> ServerUnavailable:
        return ServerUnavailable(f"{self.url}{path}: cannot read the answer: {type(error).__name__}: {error}")

    @asynccontextmanager
    async def _answer(
        self, path: str, body: Mapping[str, Any] | None, deadline_s: float | None, headers: Mapping[str, str] = _PLAIN
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200 answer, to GET without a `body`, else to POST. It is read inside; whatever fails becomes one of the two
        errors."""
        if self._session.closed:  # the call was created before the server's restart and runs only now
            raise ServerUnavailable(f"{self.url}{path}: the client was closed")
        deadline_s = self.control_deadline_s if deadline_s is None else deadline_s
        try:
            # Not aiohttp's own deadline: it swallows a cancellation that comes at the same time (its issue 5979), and
            # after a pause of the event loop a cancelled task would run on for ever.
            async with (
                asyncio.timeout(deadline_s),
                self._session.request(
                    "GET" if body is None else "POST",
                    self.url + path,
                    data=None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY),
                    headers=headers,
                ) as response,
            ):
                if response.status != 200:
                    words = (await response.read()).decode(errors="replace")[:1000]
                    raise _error_for(response.status)(f"{self.url}{path}: {response.status}: {words}")
                yield response
        except TimeoutError as error:
            raise ServerUnavailable(f"{self.url}{path}: no answer within {deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnavailable(f"{self.url}{path}: {type(error).__name__}: {error}") from error


def _error_for(status: int) -> type[RolloutError]:
    if status in (401, 403):
        return AccessDenied
    return ServerRefused if 400 <= status < 500 and status not in _RETRY_LATER else ServerUnavailable


def _tensor_rank(info: Any) -> int:
    """0.5.23 sends a list with an entry per model (a draft model would be the second), 0.5.17 the entry itself."""
    return int((info[0] if isinstance(info, list) else info)["tp_rank"])
