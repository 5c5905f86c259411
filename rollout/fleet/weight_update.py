"""New weights on every server, each server checked tensor by tensor before it serves.

    publish:  close the balancer -> pause every server -> send to all of them at once (or nothing, with weights in a
              folder) -> per server: read the folder if nothing came -> compare checksums -> resume -> open the balancer

That is `rollout.on_publish` restart. With recompute and keep the balancer stays open, and each server has a gate, where
its requests keep their places while it is paused. Half of the servers get the weights at a time: the fleet never stands
still. First comes the first half of the fleet, down or not, then the other; each keeps its process group.
A server is always stopped by ending its requests, never by SGLang's pause of running ones (`in_place`, `retract`):
  - Nobody would know which weights drew a token: the scheduler holds up to `stream_every` tokens back, and
    `weight_version` is what the HTTP process knows when they come out.
  - The cache cannot be flushed while requests wait: a retracted request finds its prompt's old keys and values again.
An answer that has ended was drawn by the old weights, whole. Under `keep` its keys and values stay in the prefix cache,
for the rest of this response and those of its group that began with the same weights alone (`Response.home`).

A server that fails on the way goes DOWN. Its supervisor restarts it and calls `bring_up_to_date`.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollout.config import RolloutConfig
from rollout.errors import ServerUnavailable
from rollout.fleet.balancer import Balancer
from rollout.fleet.member import Member, State, Timing, beside
from rollout.weights.checksums import Checksums, expected_checksums, verify, verify_draft, without_draft
from rollout.weights.sender import Sent
from rollout.weights.transport import Target
from rollout.wire.client import ServerInfo

T = TypeVar("T")
_DRAIN_POLL_S, _ABORT_AGAIN_S = 0.02, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What a publish did. A server that is down gets the weights when it is back, before it serves."""

    servers: Mapping[str, int]
    """{url: checksums compared, over all ranks} of the servers that serve them."""
    bytes: int
    """Read from a folder, or sent: once, or once to each half of the servers."""
    changed: float = 1.0
    """Share of the weights' values that these are."""
    by_disk: Mapping[str, str]
    """{url: why} of servers to which sending failed: they read a folder, at once or once they have been restarted."""
    standstill_s: float
    """Seconds in which every server that was given them stood still."""
    stopped_s: float
    """Seconds for which a server stood still, the mean of them."""


class WeightStream(Protocol):
    """Weights in the trainer's memory."""

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        """Into servers that are paused; `more`: others will be sent the same. The answer names the servers that failed,
        and has the checksums of each kind of server that no earlier answer had."""

    async def to_disk(self) -> "OnDisk | None":
        """The same weights as a folder; None when the trainer has other ones by now, or cannot gather them now."""

    @property
    def changed(self) -> bool:
        """Whether the trainer has other ones by now, or is about to: they will be published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDisk:
    """A folder in Hugging Face layout, and the checksums that were computed while it was written."""

    folder: Path
    checksums: Mapping[ServerInfo, Checksums] = field(default_factory=dict)


class Published:
    """Weights that every server must hold: in a folder, in the trainer's memory, or in both."""

    def __init__(self, weight_version: int, weights: OnDisk | WeightStream) -> None:
        self.weight_version = weight_version
        self.label = str(weight_version)
        """The servers' name of these weights."""
        self.superseded = asyncio.Event()
        """Set when the next weights are published."""
        self.weights = weights
        self.verified: set[Member] = set()
        """Servers that were given these weights and let go on."""
        self.keeping: frozenset[Member] = frozenset()
        """Servers whose cached keys and values outlast this publish."""
        self.stopped: dict[Member, float] = {}
        """Monotonic time at which its requests began to be ended."""
        self.resumed: dict[Member, float] = {}
        """Monotonic time at which it went on."""
        self.known_checksums = dict(weights.checksums) if isinstance(weights, OnDisk) else {}
        """The trainer's, by kind of server."""
        self._tasks: dict[object, asyncio.Task[Any]] = {}

    async def folder(self) -> Path | None:
        """Where they are on disk; written now if need be. None: as `WeightStream.to_disk`."""
        if isinstance(self.weights, OnDisk):
            return self.weights.folder
        if (on_disk := await self._once("folder", self.weights.to_disk)) is None:
            return None
        self.known_checksums = {**on_disk.checksums, **self.known_checksums}
        return on_disk.folder

    async def wait_for_next(self, member: Member) -> None:
        """Until the next weights are published: a server that waits for the end of an update is not lost."""
        if not isinstance(self.weights, OnDisk) and self.weights.changed:
            member.restart_deadline = float("inf")
        await self.superseded.wait()

    async def checksums(self, info: ServerInfo) -> Checksums:
        """Computed from the folder, once, for a kind of server that the trainer did not know in time."""
        if info in self.known_checksums:
            return self.known_checksums[info]
        if (folder := await self.folder()) is None:
            raise ServerUnavailable(f"weight version {self.weight_version} is gone: the trainer has newer ones")
        return await self._once(info, partial(asyncio.to_thread, expected_checksums, folder, info))

    def stood_still(self) -> dict[str, float]:
        """`PublishReport.standstill_s` and `stopped_s`."""
        times = [(begun, self.resumed[member]) for member, begun in self.stopped.items() if member in self.resumed]
        all_s = min(end for _, end in times) - max(begun for begun, _ in times) if times else 0.0
        stopped_s = sum(end - begun for begun, end in times) / max(1, len(times))
        return {"standstill_s": max(0.0, all_s), "stopped_s": stopped_s}

    async def _once(self, key: object, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `begin` returns, which is called once for all who ask, and again if it failed."""
        task = self._tasks.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._tasks[key] = asyncio.ensure_future(begin())
        return await asyncio.shield(task)


@dataclass(eq=False)
class Publisher:
    """Holds the newest published weights and brings servers to them."""

    config: RolloutConfig
    timing: Timing
    balancer: Balancer
    current: Published | None = field(default=None, init=False)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def bring_up_to_date(self, member: Member) -> None:
        """Gives a server that just started the newest weights and marks it READY.

        It reads them from disk, however they were published. When they are on no disk and the trainer has begun to
        change them, it waits for the next ones.
        """
        while True:
            published = self.current
            if published is not None:
                folder = await published.folder()
                if folder is None:
                    member.reason = f"weight version {published.weight_version} is gone; it waits for the next publish"
                    await published.wait_for_next(member)
                    continue
                published.keeping -= {member}
                await self._stop_drawing(member)
                if not self.config.speculates:
                    await self._load(member, published, folder)
                elif member.weight_label != published.label:
                    raise ServerUnavailable(f"{member.url}: it started with weights of before; SGLang reads no others")
                await self._verify_and_resume(member, published, self.timing.load_deadline_s)
            if published is self.current:
                member.enter(State.READY)
                self.balancer.dispatch()
                return

    async def to_start_with(self, member: Member) -> tuple[Path, str] | None:
        """The folder and the label of the weights that a server must be started with, since it can read no others
        later; None: any. Waits for the next publish where they are on no disk."""
        while self.config.speculates and (published := self.current) is not None:
            folder = await published.folder()
            if folder is not None:
                return folder, published.label
            await published.wait_for_next(member)
        return None

    async def hold(self) -> None:
        """Interrupts what the servers draw and keeps back requests that may be; see `RolloutFleet.hold`."""
        async with self._one_at_a_time:
            self.balancer.hold()
            self.balancer.close()
            try:
                serving = [member for member in self.balancer.members if member.serving]
                await asyncio.gather(*map(self._drain_or_end, serving))
                while any(member.in_flight for member in self.balancer.members):  # of a server that went down
                    await asyncio.sleep(_DRAIN_POLL_S)
            finally:
                self.balancer.open()

    async def publish(self, weights: OnDisk | WeightStream, weight_version: int) -> PublishReport:
        """Updates the serving servers; see `RolloutFleet.publish`."""
        size, restart = 0, self.config.on_publish == "restart"
        if isinstance(weights, OnDisk):
            size = sum(file.stat().st_size for file in weights.folder.glob("*.safetensors"))
            if not size or not (weights.folder / "config.json").is_file():
                raise FileNotFoundError(f"{weights.folder}: a publish needs config.json and .safetensors files there")
        published = Published(weight_version, weights)
        async with self._one_at_a_time:
            was_open = self.balancer.is_open  # else the servers have no memory yet for requests, nor to start again
            if restart:
                self.balancer.close()
            try:
                # From here on a server that comes back gets these weights too.
                if self.current is not None:
                    self.current.superseded.set()
                    if self.config.on_publish == "keep":  # but not what a server held before this run
                        published.keeping = frozenset(self.current.verified)
                self.current = published
                serving = [member for member in self.balancer.members if member.serving]
                try:
                    updated, sent = await self._update(serving, published, Sent(bytes=size))
                except BaseException as error:  # also a cancellation
                    for member in serving:
                        self._give_up(member, published, error)
                    raise
                servers = {member.url: compared for member, compared in updated.items() if compared is not None}
            finally:
                if was_open:
                    self.balancer.open()
            if restart:
                published.resumed = dict.fromkeys(published.resumed, time.monotonic())
            if not servers and was_open:  # waits for one, before all requests and no longer than they would
                self.balancer.release(await self.balancer.acquire("publish", priority=-sys.maxsize))
            by_disk = {url: failure.reason for url, failure in sent.failures.items()}
            times = published.stood_still()
            return PublishReport(servers=servers, bytes=sent.bytes, changed=sent.changed, by_disk=by_disk, **times)

    async def _update(
        self, serving: Sequence[Member], published: Published, sent: Sent
    ) -> tuple[Mapping[Member, int | None], Sent]:
        """{server: checksums compared}, and what was sent; `sent`: if nothing had to be."""
        if self.config.on_publish == "restart":
            return await self._wave(serving, published, sent)
        if isinstance(published.weights, OnDisk):
            half = asyncio.Semaphore(max(1, len(serving) // 2))

            async def in_turn(member: Member) -> int | None:
                async with half:
                    if not member.serving or member in published.verified:  # its supervisor does this, or has done it
                        return None
                    return await self._finish(member, published, await self._pause(published, member), sent)

            return await self._each(serving, published, in_turn), sent
        members, middle = self.balancer.members, len(self.balancer.members) // 2
        begin, rest = ([each for each in half if each in serving] for half in (members[:middle], members[middle:]))
        if not (begin and rest):
            return await self._wave(serving, published, sent)
        updated, sent = await self._wave(begin, published, sent, more=True)
        if rest := [each for each in rest if each.serving and each not in published.verified]:
            others, sent_then = await self._wave(rest, published, sent)
            updated, sent = {**updated, **others}, sent.then(sent_then)
        return updated, sent

    async def _wave(
        self, members: Sequence[Member], published: Published, sent: Sent, *, more: bool = False
    ) -> tuple[Mapping[Member, int | None], Sent]:
        """`_update` of all these servers at once; `more`: others follow."""
        paused = await self._each(members, published, partial(self._pause, published))
        if not isinstance(published.weights, OnDisk):
            with ExitStack() as stack:
                for member in paused:
                    stack.enter_context(member.busy())
                sent = await published.weights.send(tuple(paused.values()), published.label, more=more)
            published.known_checksums |= sent.checksums

        async def finish(member: Member) -> int | None:
            return await self._finish(member, published, paused[member], sent)

        return await self._each(paused, published, finish), sent

    async def _each(
        self, members: Sequence[Member] | Mapping[Member, Any], published: Published, work: Callable[..., Any]
    ) -> dict[Member, Any]:
        """{member: result} of `work(member)`, on all of them at once, in their order, without those that failed: they
        are DOWN. Any other error is raised once all have ended."""
        results: dict[Member, Any] = {}

        async def one(member: Member) -> None:
            try:
                results[member] = await work(member)
            except ServerUnavailable as error:
                self._give_up(member, published, error)

        for error in filter(None, await asyncio.gather(*map(one, members), return_exceptions=True)):
            raise error
        return {member: results[member] for member in members if member in results}

    def _give_up(self, member: Member, published: Published, error: BaseException) -> None:
        if member.serving and member not in published.verified:  # it may be paused, with a part of the weights
            member.enter(State.DOWN, f"publish of version {published.weight_version}: {error}")

    async def _pause(self, published: Published, member: Member) -> Target:
        """Stops the server, and returns where weights for it go. After a restart it has another address."""
        published.stopped[member] = time.monotonic()
        if self.config.on_publish != "restart":
            member.gate.clear()
        await self._drain(member)
        await member.call(self._stop_drawing(member, flush=member not in published.keeping))
        assert member.info is not None
        index = self.balancer.members.index(member)
        held, restarts = member.weight_label, member.restarts
        return Target(url=member.url, info=member.info, restarts=restarts, index=index, holds=held)

    async def _drain_or_end(self, member: Member) -> None:
        try:
            await self._drain(member)
        except ServerUnavailable as error:
            if member.serving:
                member.enter(State.DOWN, f"interruption of its requests: {error}")

    async def _drain(self, member: Member) -> None:
        """Ends what the server draws; each request keeps its tokens and waits at the gate if that is closed, else for
        the balancer to open."""
        member.interruptions += 1
        deadline = time.monotonic() + self.timing.control_deadline_s
        next_abort = 0.0
        while member.in_flight if member.gate.is_set() else member.drawing:
            now = time.monotonic()
            if now > deadline:
                raise ServerUnavailable(f"{member.url}: {member.in_flight} requests did not end on abort")
            if now > next_abort:  # the first call does not end a request that is still on its way to the server
                member.stop_lent(member.url, False)
                await member.call(member.client.abort(None))
                next_abort = now + _ABORT_AGAIN_S
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _stop_drawing(self, member: Member, *, flush: bool = True) -> None:
        """Pauses the server, to flush its cache once it is idle: a request that is answered stays in SGLang's scheduler
        for up to a step more, and in one that is paused for ever, so that the cache could not be flushed. Where it is
        not, such a request leaves after the pause.

        A server that others run may hold requests that are not this fleet's, for example of a run that was killed in
        the middle of a publish.
        """
        if not member.engine.ours:
            await member.client.resume()
            await member.client.abort(None)
        if flush:
            await member.client.flush_cache()  # waits until all have ended
        await member.client.pause()

    async def _finish(self, member: Member, published: Published, target: Target, sent: Sent) -> int | None:
        """Lets a paused server serve again, once it has the weights and they are verified. A server that was not sent
        all of them, but answers, reads the folder.

        Returns:
            The number of checksums compared. None: it was restarted meanwhile, and its supervisor does this.
        """
        if member.restarts != target.restarts or not member.serving:
            return None
        failure = sent.failures.get(target.url)
        if failure is not None and (not failure.answers or self.config.speculates):
            raise ServerUnavailable(failure.reason)
        deadline_s = self.config.sync_deadline_s  # over NCCL the checksums are the first answer that needs the data
        if isinstance(published.weights, OnDisk) or failure is not None:
            folder = await published.folder()
            assert folder is not None, "the trainer waits for this publish"
            await member.call(self._load(member, published, folder))
            deadline_s = self.timing.load_deadline_s
        return await member.call(self._verify_and_resume(member, published, deadline_s))

    async def _load(self, member: Member, published: Published, folder: Path) -> None:
        """The server reads the folder; the checksums it must have are computed meanwhile."""
        assert member.info is not None
        with beside(published.checksums(member.info)) as computing:
            with member.busy():
                body = {"model_path": str(folder)}
                await member.client.update_weights("disk", body, published.label, self.timing.load_deadline_s)
            await computing

    async def _verify_and_resume(self, member: Member, published: Published, deadline_s: float) -> int:
        """Verifies a paused server that holds the weights, and lets it go on; the number of checksums compared."""
        assert member.info is not None
        if member not in published.keeping:
            await member.client.flush_cache()
        with member.busy():
            reported = await member.client.checksums(deadline_s)
        member.draft = verify_draft(member.draft, reported, member.url)
        verify(await published.checksums(member.info), without_draft(reported), member.url)
        await member.client.resume()
        member.weight_version, member.weight_label = published.weight_version, published.label
        published.verified.add(member)
        published.resumed[member] = time.monotonic()
        member.gate.set()
        self.balancer.dispatch()
        return sum(len(names) for names in reported.values())
