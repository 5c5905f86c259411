"""Which server gets which request: the urgent ones first, to the server with the fewest in flight, groups together;
none while weights change."""

import asyncio
import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, TypeVar

from rollout.errors import RolloutError, ServerUnavailable
from rollout.fleet.deadlines import Timing
from rollout.server.engine import Engine
from rollout.wire.client import ServerInfo, SglangClient

T = TypeVar("T")

WINDOW, WINDOW_A_SERVER = 64, 16
"""Waiting requests looked through for one whose group is at the free server, at least, and for each server: as many
groups as there are servers are under way at once. Bounds how far one can be overtaken."""
REMEMBERED_GROUPS = 8192


class State(StrEnum):
    """STARTING -> READY <-> SUSPECT -> DOWN -> STARTING ..."""

    STARTING = "starting"
    READY = "ready"
    SUSPECT = "suspect"
    """A request failed: it gets no new ones until a probe is answered."""
    DOWN = "down"


class Member:
    """An engine, the client to it, and what the fleet knows of it."""

    def __init__(self, engine: Engine, request_deadline_s: float, timing: Timing, api_key: str | None = None) -> None:
        self.engine = engine
        self.state = State.STARTING
        self.reason = ""
        self.since = time.monotonic()
        self.in_flight = 0
        self.restarts = 0
        self.returns_by = 0.0
        """Monotonic time until which its first restart since it last served may take: till then it is not lost."""
        self.late = False
        """Whether it was merely slower than the others when the fleet started, and starts still."""
        self.weight_version = 0
        self.weight_label: str | None = None
        self.info: ServerInfo | None = None
        self.answered = 0.0
        """Monotonic time of the last response, or end of `work`: a server that answers is alive, however late its
        probes are."""
        self._at_work = 0
        self.attention = asyncio.Event()
        """Set to make the supervisor look at once."""
        self._deadlines = (request_deadline_s, timing.control_deadline_s)
        self._api_key = api_key
        self._client: SglangClient | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def serving(self) -> bool:
        """Whether it holds the current weights and may have requests."""
        return self.state in (State.READY, State.SUSPECT)

    @property
    def client(self) -> SglangClient:
        """A client to the engine's present address."""
        if self._client is None or self._client.url != self.engine.url:
            request_deadline_s, control_deadline_s = self._deadlines
            self._client = SglangClient(
                self.engine.url,
                request_deadline_s=request_deadline_s,
                control_deadline_s=control_deadline_s,
                api_key=self._api_key,
            )
        return self._client

    async def probe(self, deadline_s: float) -> None:
        """Returns if its HTTP process answers; raises as `client`."""
        await (self.client.health(deadline_s) if self.engine.ours else self.client.answers(deadline_s))

    async def forget_client(self) -> None:
        """Closes the connections; the next call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def enter(self, state: State, reason: str = "") -> None:
        """Changes the state; DOWN also ends the calls that wait for an answer."""
        self.state, self.reason, self.since = state, reason, time.monotonic()
        if state is State.DOWN:
            if not self._ended.done():
                self._ended.set_result(reason)
        elif self._ended.done():
            self._ended = asyncio.get_running_loop().create_future()
        if state in (State.SUSPECT, State.DOWN):
            self.attention.set()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Inside, it loads weights, hashes them or moves them: its scheduler answers nobody else, for as long as the
        deadline of that work allows."""
        self._at_work += 1
        try:
            yield
            self.answered = time.monotonic()
        finally:
            self._at_work -= 1

    def silent_since(self, moment: float) -> bool:
        """Whether it has given no sign of life since, though nothing keeps it from answering."""
        return not self._at_work and self.answered < moment

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Awaits a call to the server, no longer than the server is up.

        Raises:
            ServerUnavailable: the server went DOWN meanwhile.
        """
        task = asyncio.ensure_future(coroutine)
        ended = self._ended
        either: set[asyncio.Future[Any]] = {task, ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ServerUnavailable(f"{self.url}: {ended.result()}")
            return task.result()
        finally:
            task.cancel()


@dataclass(slots=True, eq=False)
class _Waiter:
    group_id: str
    priority: int
    avoid: Member | None
    """Failed it: it goes to another server while there is one."""
    place: "asyncio.Future[Member]"


class Balancer:
    """The queue before the servers."""

    def __init__(self, members: Sequence[Member], limit: int) -> None:
        self.members = members
        self.limit = limit
        self._window = max(WINDOW, WINDOW_A_SERVER * len(members))
        self._open = True
        self._ended: RolloutError | None = None
        self._waiting: list[_Waiter] = []
        """By priority, equal ones in the order in which they came."""
        self._home: OrderedDict[str, Member] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Requests without a server."""
        return sum(not waiter.place.done() for waiter in self._waiting)

    async def acquire(self, group_id: str, priority: int = 0, avoid: Member | None = None) -> Member:
        """A place at a server, to be given back by `release`; the smaller `priority` goes first. The supervisor bounds
        the wait by `refuse`.

        Args:
            avoid: a server that failed this request, which gets it again only while no other one serves.
        """
        if self._ended is not None:
            raise self._ended
        waiter = _Waiter(group_id, priority, avoid, asyncio.get_running_loop().create_future())
        insort(self._waiting, waiter, key=lambda each: each.priority)
        self.dispatch()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            # Cancelled while it waited: `dispatch` passes over it. Cancelled with the place in hand: give it back.
            if not waiter.place.cancelled() and waiter.place.exception() is None:
                self.release(waiter.place.result())
            raise

    def release(self, member: Member) -> None:
        """Gives a place back."""
        member.in_flight -= 1
        self.dispatch()

    def close(self) -> None:
        """No request starts from now on."""
        self._open = False

    def open(self) -> None:
        """Requests start again."""
        self._open = True
        self.dispatch()

    def end(self, error: RolloutError) -> None:
        """Refuses all requests, now and later."""
        self._ended = error
        self.refuse(error)

    def refuse(self, error: RolloutError) -> None:
        """Ends the wait of every request that has no server."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.place.done():
                waiter.place.set_exception(error)

    def dispatch(self) -> None:
        """Gives free places to waiting requests."""
        while self._open and self._waiting:
            free = [member for member in self.members if member.state is State.READY and member.in_flight < self.limit]
            if not free:
                return
            match = self._match(free)
            if match is None:
                return
            index, member = match
            waiter = self._waiting[index]
            del self._waiting[index]
            if waiter.place.done():  # cancelled
                continue
            self._home[waiter.group_id] = member
            self._home.move_to_end(waiter.group_id)
            if len(self._home) > REMEMBERED_GROUPS:
                self._home.popitem(last=False)
            member.in_flight += 1
            waiter.place.set_result(member)

    def _match(self, free: list[Member]) -> tuple[int, Member] | None:
        """The first request that can go where its group is, or has no group anywhere; else the first of all. None if
        all that wait avoid what is free."""
        idlest = min(free, key=lambda member: member.in_flight)
        first: tuple[int, Member] | None = None
        passed: str | None = None  # most often the next one is of the same group, and can go nowhere either
        for index, waiter in enumerate(islice(self._waiting, self._window)):
            if waiter.group_id == passed and waiter.avoid is None:
                continue
            home, best = self._home.get(waiter.group_id), idlest
            if waiter.avoid is not None and any(one.serving for one in self.members if one is not waiter.avoid):
                others = [member for member in free if member is not waiter.avoid]
                if not others:
                    continue
                home, best = None, min(others, key=lambda member: member.in_flight)
            if home in free:
                return index, home
            if home is None or not home.serving:
                return index, best
            first = first or (index, best)
            passed = waiter.group_id if waiter.avoid is None else None
        return first
