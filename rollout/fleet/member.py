"""A server as the fleet sees it: its engine, the client to it, its state, how long its answers may take, and what
the servers say of their KV cache and their queues, summed up over a rollout step."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from rollout.errors import ServerUnavailable
from rollout.generation import ServedPart
from rollout.server.engine import Engine
from rollout.wire.client import ServerInfo, ServerLoad, SglangClient

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long the fleet waits for a server's answers, in seconds. Section `rollout` of the config has the waits that
    a user sets."""

    probe_interval_s: float = 1.0
    """Between two checks of a server's process and /health; in a large fleet more (`supervision.PROBED`)."""
    probe_deadline_s: float = 5.0
    """For one answer of /health."""
    failed_probes: int = 3
    """Failed probes in a row after which a server is restarted."""
    scheduler_interval_s: float = 15.0
    """Between two questions to a server's scheduler: the HTTP process alone answers /health."""
    scheduler_deadline_s: float = 180.0
    """For its answer, which comes between two forward passes."""
    load_interval_s: float = 5.0
    """Between two questions to a server for the use of its KV cache and the length of its queue."""
    control_deadline_s: float = 30.0
    """For pause, continue, abort and flush."""
    load_deadline_s: float = 1800.0
    """For loading weights from a folder, and for computing checksums."""
    first_backoff_s: float = 1.0
    """Pause after a start that failed; doubled up to `longest_backoff_s`."""
    longest_backoff_s: float = 30.0
    report_interval_s: float = 15.0
    """Between two reports of a wait that goes on."""

    def backoff_s(self, attempt: int) -> float:
        """The pause after a failed attempt, counted from 0."""
        return min(self.first_backoff_s * 2 ** min(attempt, 30), self.longest_backoff_s)


class State(StrEnum):
    """STARTING -> READY <-> SUSPECT -> DOWN -> STARTING ..."""

    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    """A request failed. The server gets no new ones until it answers a probe."""
    DOWN = "down"


class Member:
    """One server of the fleet."""

    def __init__(self, engine: Engine, connect: Callable[[str], SglangClient]) -> None:
        """`connect`: makes a client to the server at a URL."""
        self.engine, self.state, self.reason = engine, State.STARTING, ""
        self.in_flight, self.drawing = 0, 0
        """Of `in_flight`, those that it answers; the others wait at the gate."""
        self.interruptions = 0
        """Times that its requests were ended, by a publish or by `hold`: whether a request was aborted by one."""
        self.restarts = 0
        self.restart_deadline = 0.0
        """Monotonic time. Until then its first restart since it last served is under way, and it does not count as
        lost."""
        self.late = False
        """Whether it was slower than the others when the fleet started, and is still starting."""
        self.weight_version = 0
        self.weight_label: str | None = None
        self.info: ServerInfo | None = None
        self.draft: dict[int, dict[str, str]] | None = None
        """Of its draft model's tensors since its start; None: not asked for yet."""
        self.kv_use: float | None = None
        """Share of its KV cache in use when it was last asked; None: it does not tell."""
        self.in_flight_then = self.queue_then = 0
        self.last_answer = 0.0
        """Monotonic time of the last response, or of the end of `busy`. A server that answers is alive, even if its
        probes are late."""
        self.busy_calls = 0
        """Of `busy`, under way."""
        self.gate = asyncio.Event()
        """Set unless a publish keeps requests from being begun. They keep their place meanwhile."""
        self.gate.set()
        self.stop_lent: Callable[[str, bool], None] = lambda url, lost: None
        """Called with its URL: other processes must end what they draw there; and whether it is lost, and will not end
        it."""
        self._connect = connect
        self._client: SglangClient | None = None
        self._down: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def serving(self) -> bool:
        """Whether it may have requests. While new weights are loaded and verified it is paused."""
        return self.state in (State.READY, State.SUSPECT)

    async def passed(self) -> bool:
        """Waits at the gate until it is open, or the server is lost: whether a request may begin."""
        while not self.gate.is_set():
            await self.gate.wait()
        return self.serving

    @property
    def client(self) -> SglangClient:
        """A client to the address that the engine had when it was first asked for, or since `forget_client`."""
        self._client = self._client or self._connect(self.engine.url)
        return self._client

    async def probe(self, deadline_s: float) -> None:
        """Returns if its HTTP process answers. Raises what `client` raises."""
        await self.client.health(deadline_s, ours=self.engine.ours)

    async def forget_client(self) -> None:
        """Closes the connections; the next call opens new ones."""
        client, self._client, self.draft = self._client, None, None
        if client is not None:
            await client.close()

    def enter(self, state: State, reason: str = "") -> None:
        """Changes the state; DOWN also ends the calls that wait for an answer, and every wait at the gate."""
        self.state, self.reason = state, reason
        if state is State.DOWN:
            self.stop_lent(self.url, True)
            self.gate.set()  # who waits there goes to another server
            if not self._down.done():
                self._down.set_result(reason)
        elif self._down.done():
            self._down = asyncio.get_running_loop().create_future()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around calls that load, hash or move weights. The scheduler answers nothing else meanwhile, so its silence
        says nothing; the call has its own deadline."""
        self.busy_calls += 1
        try:
            yield
            self.last_answer = time.monotonic()
        finally:
            self.busy_calls -= 1

    async def call(self, coroutine: Coroutine[Any, Any, T], failure: "asyncio.Future[str] | None" = None) -> T:
        """Awaits a call to the server, but no longer than the server is up, or until `failure` says why it is not.

        Raises:
            ServerUnavailable: the server went DOWN meanwhile, or failed.
        """
        failure = failure or self._down
        with beside(coroutine) as task:
            either: set[asyncio.Future[Any]] = {task, failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ServerUnavailable(f"{self.url}: {failure.result()}")
            return task.result()


@contextmanager
def beside(work: Coroutine[Any, Any, T]) -> Iterator[asyncio.Future[T]]:
    """`work` runs meanwhile; it is cancelled at the end if it is not done."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()


async def end_all(tasks: "Sequence[asyncio.Future[Any]]") -> None:
    """Cancels what is not done, and waits until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ServerStatistics:
    """Sums of samples and answers until `take`. What no server tells is left out."""

    def __init__(self) -> None:
        self._sums = defaultdict[str, float](float)
        self._largest: dict[str, float | int] = {}

    def sampled(self, load: ServerLoad) -> None:
        """A server's load, as it was asked for."""
        self._sums["samples"] += 1
        for name, value in (("kv_use", load.kv_use), ("queue", load.waiting)):
            self._sums[name] += value
            self._largest[name] = max(value, self._largest.get(name, 0))

    def served(self, part: ServedPart) -> None:
        """A server's answer to a request."""
        if part.cached_tokens is not None:
            self._sums["prompt_tokens"] += part.prompt_tokens
            self._sums["cached_tokens"] += min(part.cached_tokens, part.prompt_tokens)
        if part.retractions is not None:
            self._sums["retractions"] += part.retractions

    def take(self) -> dict[str, float | int]:
        """The metrics `servers/*` since the last call."""
        sums, largest, metrics = self._sums, self._largest, dict[str, float | int]()
        self._sums, self._largest = defaultdict(float), {}
        for name, value in largest.items():
            metrics |= {f"servers/{name}": sums[name] / sums["samples"], f"servers/{name}_max": value}
        if sums["prompt_tokens"]:
            metrics["servers/prefix_hits"] = sums["cached_tokens"] / sums["prompt_tokens"]
        if "retractions" in sums:
            metrics["servers/retractions"] = int(sums["retractions"])
        return metrics
