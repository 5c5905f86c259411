"""Looks after the servers: notices the dead and the silent, restarts them, and says when all are down for too long."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from rollout.errors import (
    AccessDenied,
    FleetLost,
    ServerEnded,
    ServerRefused,
    ServerStartError,
    ServerUnavailable,
    ServerUnfit,
)
from rollout.fleet.balancer import Balancer, Member, State
from rollout.fleet.deadlines import Timing
from rollout.fleet.gpu_memory import Occupation
from rollout.weights.weight_update import Publisher, describe

_READY_POLL_S = 0.25
_GUARD_POLL_S = 0.25

ONE_SPARE_IN = 10
"""A fleet starts without one server in so many; a smaller one needs all."""
PATIENCE = 2.0
"""Times the seconds that enough servers took to start: so long the last ones are waited for."""


class Supervisor:
    """One task a server, and one that watches over all of them."""

    def __init__(
        self,
        members: Sequence[Member],
        balancer: Balancer,
        publisher: Publisher,
        occupation: Occupation,
        *,
        timing: Timing,
        start_deadline_s: float,
        fleet_deadline_s: float,
        report: Callable[[str], None],
    ) -> None:
        self.members = members
        self.balancer = balancer
        self.publisher = publisher
        self.occupation = occupation
        self.timing = timing
        self.start_deadline_s = start_deadline_s
        self.fleet_deadline_s = fleet_deadline_s
        self.report = report
        self._tasks: list[asyncio.Task[None]] = []
        self._check: Callable[[Member], None] = lambda member: None

    def start(self) -> None:
        """Begins to watch servers that are READY."""
        self._tasks = [asyncio.ensure_future(self._watch(member)) for member in self.members]
        self._tasks.append(asyncio.ensure_future(self._guard()))

    async def close(self) -> None:
        """Ends all watching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def start_all(self, deadline_s: float, check: Callable[[Member], None]) -> None:
        """Starts all servers and returns when they are READY, or enough of them: those that failed and those that take
        far longer than the others are DOWN then, and brought up like any that is lost later.

        Args:
            check: raises ServerUnfit for a server that answers, and that the run cannot use; asked again of a server
                that is brought up later.

        Raises:
            ServerStartError: names each server that is not ready, with the tail of its log. `ServerUnfit`: the first.
        """

        async def begin(member: Member) -> None:
            await self.start_member(member, deadline_s)
            check(member)
            member.enter(State.READY)

        self._check = check
        began, spare = time.monotonic(), len(self.members) // ONE_SPARE_IN
        starting = {asyncio.ensure_future(begin(member)): member for member in self.members}
        pending, problems, until = set(starting), dict[Member, ServerStartError](), 0.0
        try:
            while pending:
                left_s = max(0.0, until - time.monotonic()) if until else None
                done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    error = task.exception()
                    if isinstance(error, ServerStartError) and not isinstance(error, ServerUnfit):
                        problems[starting[task]] = error
                    elif error is not None:
                        raise error
                if len(problems) > spare:
                    break
                if not until and len(pending) + len(problems) <= spare:
                    until = began + PATIENCE * (time.monotonic() - began)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        missing = [member for member in self.members if member.state is not State.READY]
        if len(missing) > spare:
            text = "\n".join(str(problem) for problem in problems.values())
            others = f"; {len(missing) - len(problems)} were not awaited" if len(missing) > len(problems) else ""
            raise ServerStartError(f"{len(problems)} of {len(self.members)} servers did not start{others}\n{text}")
        for member in missing:
            late = f"it was not ready {time.monotonic() - began:.0f} s after the start of the fleet"
            member.late = member not in problems
            member.enter(State.DOWN, str(problems.get(member, late)).splitlines()[0])
        if missing:
            self.report(f"the run begins without {len(missing)} of {len(self.members)} servers")

    async def start_member(self, member: Member, deadline_s: float) -> None:
        """Starts a server and returns when it is ready. One that ends meanwhile is started once more; one that is
        killed, until the deadline.

        Raises:
            ServerStartError: as `wait_ready`.
        """
        began, ended = time.monotonic(), 0
        await member.engine.start()
        while True:
            try:
                return await self.wait_ready(member, deadline_s, began)
            except ServerEnded as error:
                ended += not member.engine.killed()
                if ended > 1 or time.monotonic() - began > deadline_s:
                    raise
                self.report(f"server {str(error).splitlines()[0]}; starting it again")
            await asyncio.sleep(self.timing.first_backoff_s)
            await member.forget_client()
            await member.engine.restart()

    async def wait_ready(self, member: Member, deadline_s: float, began: float | None = None) -> None:
        """Returns when the server's HTTP process and its scheduler answer, and notes what it says of itself.

        Args:
            began: when the `deadline_s` began (time.monotonic); None: now.

        Raises:
            ServerStartError: it did not answer in time; `ServerEnded`: it ended. Both with the tail of its log.
        """
        deadline = (time.monotonic() if began is None else began) + deadline_s
        problem = "no answer yet"
        while True:
            if not member.engine.alive():
                raise ServerEnded(
                    f"{member.url}: the server ended while it started, or was stopped\n{member.engine.log_tail()}"
                )
            try:
                await member.probe(self.timing.probe_deadline_s)
                member.info = await member.client.server_info(self.timing.probe_deadline_s)
                member.weight_label = await member.client.weight_label()
                return
            except AccessDenied as error:  # it will not change its mind
                raise ServerUnfit(
                    f"{error}\nrollout.api_key_file names the file with the key that it asks for"
                ) from None
            except (ServerUnavailable, ServerRefused) as error:
                problem = str(error)
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"{member.url}: not ready within {deadline_s:g} s: {problem}\n{member.engine.log_tail()}"
                )
            await asyncio.sleep(_READY_POLL_S)

    async def _watch(self, member: Member) -> None:
        while True:
            try:
                reason = await self._until_failure(member)
            except Exception as error:  # a fault of ours must not leave a server unwatched
                reason = f"looking after it failed ({type(error).__name__}: {error})"
            self.report(f"server {member.url} is down: {reason}; restarting it")
            member.enter(State.DOWN, reason)
            self.balancer.dispatch()  # who avoided another server on its account need not any more
            await self._revive(member)
            self.report(f"server {member.url} is back with weight version {member.weight_version}")

    async def _until_failure(self, member: Member) -> str:
        """Looks until the server has to be restarted; returns why."""
        scheduler = asyncio.ensure_future(self._until_scheduler_fails(member))
        failed = 0
        try:
            while True:
                member.attention.clear()
                if member.state is State.DOWN:
                    return member.reason
                if not member.engine.alive():
                    return "its process ended or was stopped"
                if scheduler.done():
                    return scheduler.result()
                asked = time.monotonic()
                try:
                    # An answer to a request says as much as one to a probe, and costs nothing.
                    if member.state is State.SUSPECT or asked - member.answered > self.timing.probe_interval_s:
                        await member.call(member.probe(self.timing.probe_deadline_s))
                    failed = 0
                    if member.state is State.SUSPECT:
                        member.enter(State.READY)
                        self.balancer.dispatch()
                except (ServerUnavailable, ServerRefused) as error:
                    failed += member.answered < asked
                    if failed >= self.timing.failed_probes:
                        return f"{failed} probes failed, the last one: {error}"
                # Not `wait_for`: before Python 3.12 it can swallow a cancellation.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.timing.probe_interval_s):
                        await member.attention.wait()
        finally:
            scheduler.cancel()

    async def _until_scheduler_fails(self, member: Member) -> str:
        while True:
            await asyncio.sleep(self.timing.scheduler_interval_s)
            asked = time.monotonic()
            try:
                await member.client.server_info(self.timing.scheduler_deadline_s)
            except (ServerUnavailable, ServerRefused) as error:
                if member.silent_since(asked):
                    return f"its scheduler does not answer: {error}"

    async def _revive(self, member: Member) -> None:
        """Restarts the server until it serves the newest weights."""
        backoff_s = self.timing.first_backoff_s
        if member.engine.ours:
            member.returns_by = time.monotonic() + self.start_deadline_s + self.timing.load_deadline_s
        while True:
            try:
                await self._restart(member)
                return
            except Exception as error:  # whatever it was: this task is the only one that brings the server back
                member.returns_by = 0.0
                member.enter(State.DOWN, (str(error) or type(error).__name__).splitlines()[0])
                self.report(f"server {member.url} did not come back, next attempt in {backoff_s:g} s: {error}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self.timing.longest_backoff_s)

    async def _restart(self, member: Member) -> None:
        starts_still, member.late = member.late and member.engine.alive(), False
        if not starts_still:
            member.restarts += 1
            await member.forget_client()
            async with self.occupation.start_of_a_server():
                await member.engine.restart()
        member.enter(State.STARTING, member.reason)
        await self.wait_ready(member, self.start_deadline_s)
        self._check(member)
        if not member.engine.ours:
            # Nobody restarted it: its device may still wait in a broken process group, while its processes answer.
            with member.work():
                await member.client.checksums(self.timing.load_deadline_s)
        failure = asyncio.ensure_future(self._until_failure(member))
        load = asyncio.ensure_future(self.publisher.bring_up_to_date(member))
        try:
            await asyncio.wait({failure, load}, return_when=asyncio.FIRST_COMPLETED)
            if not load.done():
                raise ServerUnavailable(f"{member.url}: {failure.result()}")
            load.result()
        finally:
            failure.cancel()
            load.cancel()

    async def _guard(self) -> None:
        """Says what is awaited while no server serves, and ends the waits of requests after `fleet_deadline_s`, or when
        no server comes back from its first restart."""
        down_since = reported = None
        while True:
            await asyncio.sleep(_GUARD_POLL_S)
            now = time.monotonic()
            if any(member.serving for member in self.members) or not self.occupation.allowed:
                down_since = reported = None
                continue
            down_since = down_since or now
            states = ", ".join(f"{member.url} ({member.state}: {member.reason})" for member in self.members)
            if reported is None or now - reported > self.timing.report_interval_s:
                reported = now
                self.report(
                    f"all servers are down for {now - down_since:.0f} s (of {self.fleet_deadline_s:g} s); "
                    f"{self.balancer.waiting} requests wait for {states}"
                )
            if now - down_since > self.fleet_deadline_s and all(member.returns_by < now for member in self.members):
                self.balancer.refuse(
                    FleetLost(
                        f"all servers are down for longer than rollout.fleet_deadline_s = {self.fleet_deadline_s:g}; "
                        f"last words:\n{describe(self.members)}"
                    )
                )
