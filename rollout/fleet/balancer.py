"""Which server gets which request: urgent requests first, each to the server with the least to do, groups together.
None is sent while weights change.

The least to do: the emptiest KV cache where all servers tell, since a long response takes more of it than a short one;
else the fewest requests in flight.
"""

import asyncio
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from rollout.errors import RolloutError
from rollout.fleet.member import Member, State

MIN_WINDOW, WINDOW_PER_SERVER = 64, 16
"""Waiting requests that are searched for one whose group is already at the free server. With this many per server, as
many groups as there are servers are under way at once. The window also bounds how often a request is overtaken."""
REMEMBERED_GROUPS = 8192


@dataclass(slots=True, eq=False)
class _Waiter:
    group_id: str
    priority: int
    avoid: Member | None
    """The server that failed this request. It goes to another one while there is one."""
    place: "asyncio.Future[Member]"
    holdable: bool = False


class Balancer:
    """The queue before the servers."""

    def __init__(self, members: Sequence[Member], limit: int) -> None:
        self.members, self.limit = members, limit
        self._window = max(MIN_WINDOW, WINDOW_PER_SERVER * len(members))
        self.is_open = True
        """Whether requests start."""
        self._request_use: float | None = None
        """KV cache that a request takes, mean; None: not every server tells how much it uses."""
        self._ended: RolloutError | None = None
        self._waiting: list[_Waiter] = []
        """By priority, then by arrival."""
        self._held: list[_Waiter] | None = None
        """Those that are kept back, likewise. None: none is."""
        self._group_server: dict[str, Member] = {}
        """Of the groups asked for last, the newest at the end."""

    @property
    def waiting(self) -> int:
        """Requests without a server, but for those that are kept back."""
        return sum(not waiter.place.done() for waiter in self._waiting)

    async def acquire(
        self, group_id: str, priority: int = 0, avoid: Member | None = None, *, holdable: bool = False
    ) -> Member:
        """A place at a server, to be given back by `release`. The smallest `priority` goes first. The supervisor bounds
        the wait: it calls `refuse`.

        Args:
            avoid: a server that failed this request. It gets it again only while no other one serves.
            holdable: whether `hold` keeps it back. It then waits for `let_go`, as long as that takes.
        """
        if self._ended is not None:
            raise self._ended
        waiter = _Waiter(group_id, priority, avoid, asyncio.get_running_loop().create_future(), holdable)
        queue = self._held if holdable and self._held is not None else self._waiting
        insort(queue, waiter, key=lambda each: each.priority)
        self.dispatch()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            # Cancelled while it waited: `dispatch` skips it. Cancelled just after it got the place: give that back.
            if not waiter.place.cancelled() and waiter.place.exception() is None:
                self.release(waiter.place.result())
            raise

    def release(self, member: Member) -> None:
        """Gives a place back."""
        member.in_flight -= 1
        self.dispatch()

    def told(self, member: Member, kv_use: float | None, queue: int = 0) -> None:
        """Notes what part of its KV cache the server uses now, and how many requests wait inside it; None: it does not
        tell."""
        member.kv_use, member.in_flight_then, member.queue_then = kv_use, member.in_flight, queue
        serving = [each for each in self.members if each.serving]
        uses = [each.kv_use for each in serving if each.kv_use is not None]
        mean = sum(uses) / max(1, sum(each.in_flight_then - each.queue_then for each in serving))
        self._request_use = mean if mean and len(uses) == len(serving) else None

    def _load(self, member: Member) -> float:
        """In requests: what it used when it was last asked, those that waited inside it, and those that came or went
        since. Half of its requests at least: a server that hangs tells an old figure."""
        if self._request_use is None or member.kv_use is None:
            return member.in_flight
        since = member.in_flight - member.in_flight_then
        return max(member.kv_use / self._request_use + member.queue_then + since, member.in_flight / 2)

    def close(self) -> None:
        """No request starts from now on."""
        self.is_open = False

    def open(self) -> None:
        """Requests start again."""
        self.is_open = True
        self.dispatch()

    def hold(self) -> None:
        """Keeps back every request that may be, until `let_go`; all others go on."""
        held = [waiter for waiter in self._waiting if waiter.holdable]
        self._waiting = [waiter for waiter in self._waiting if not waiter.holdable]
        self._held = sorted([*(self._held or ()), *held], key=lambda each: each.priority)

    def let_go(self) -> None:
        """Puts the requests that were kept back into the queue."""
        if self._held is not None:
            self._waiting = sorted([*self._held, *self._waiting], key=lambda each: each.priority)
            self._held = None
            self.dispatch()

    def end(self, error: RolloutError) -> None:
        """Refuses all requests, now and later."""
        self.let_go()
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
        while self.is_open and self._waiting:
            first = self._waiting[0]
            home = None if first.avoid is not None else self._group_server.get(first.group_id)
            if home is not None and self._is_free(home):  # what `_match` would find, without a look at all servers
                match: tuple[int, Member] | None = (0, home)
            else:
                free = [member for member in self.members if self._is_free(member)]
                match = self._match(free) if free else None
            if match is None:
                return
            index, member = match
            waiter = self._waiting.pop(index)
            if waiter.place.done():  # cancelled
                continue
            self._group_server.pop(waiter.group_id, None)
            self._group_server[waiter.group_id] = member
            if len(self._group_server) > REMEMBERED_GROUPS:
                del self._group_server[next(iter(self._group_server))]
            member.in_flight += 1
            waiter.place.set_result(member)

    def _is_free(self, member: Member) -> bool:
        return member.state is State.READY and member.gate.is_set() and member.in_flight < self.limit

    def _match(self, free: list[Member]) -> tuple[int, Member] | None:
        """The next waiting request, by index, and its server: the first one whose group is at a free server, or at no
        server that serves; else the first one that may use a free server. None if all that wait avoid what is free."""
        idlest = min(free, key=self._load)
        fallback: tuple[int, Member] | None = None
        blocked_group: str | None = None  # most often the next request is of the same group: skipped without a search
        for index, waiter in enumerate(islice(self._waiting, self._window)):
            if waiter.group_id == blocked_group and waiter.avoid is None:
                continue
            at_group, best = self._group_server.get(waiter.group_id), idlest
            if waiter.avoid is not None and any(one.serving for one in self.members if one is not waiter.avoid):
                others = [member for member in free if member is not waiter.avoid]
                if not others:
                    continue
                at_group, best = None, min(others, key=self._load)
            if at_group in free:
                return index, at_group
            if at_group is None or not at_group.serving:
                return index, best
            fallback = fallback or (index, best)
            blocked_group = waiter.group_id if waiter.avoid is None else None
        return fallback
