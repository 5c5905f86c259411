"""New weights on every server, each checked tensor by tensor before it serves."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollout.errors import FleetLost, ServerUnavailable
from rollout.fleet.balancer import Balancer, Member, State
from rollout.fleet.deadlines import Timing
from rollout.weights.checksums import Checksums, expected_checksums, verify
from rollout.weights.sender import Sent
from rollout.weights.transport import Failure, Target
from rollout.wire.client import ServerInfo

T = TypeVar("T")

_DRAIN_POLL_S = 0.02
_ABORT_AGAIN_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPublish:
    """One server's share: ServerPublish(url="http://127.0.0.1:30000", tensors=290, seconds=1.4)"""

    url: str
    tensors: int
    """Checksums compared, over all ranks."""
    seconds: float
    """From the pause to the last checksum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What a publish did. Servers in `down` get the weights when they are back, before they serve."""

    weight_version: int
    servers: tuple[ServerPublish, ...]
    down: tuple[str, ...]
    interrupted: int
    """Responses that were being drawn; they go on with the new weights, after the tokens they have."""
    seconds: float
    bytes: int
    """Of the weights."""
    by_disk: Mapping[str, str]
    """{url: why} of servers that read a folder because the way without one failed."""


class WeightStream(Protocol):
    """Weights in the trainer's memory."""

    async def send(self, targets: Sequence[Target], label: str) -> Sent:
        """Into servers that are paused. A server that fails is named in the answer; checksums for their kinds."""
        ...

    async def to_disk(self) -> "OnDisk | None":
        """The same weights as a folder; None when the trainer has other ones by now."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDisk:
    """A folder in Hugging Face layout, and the checksums that were computed while it was written."""

    folder: Path
    checksums: Mapping[ServerInfo, Checksums] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))


class Published:
    """Weights that every server must hold: in a folder, in the trainer's memory, or in both."""

    def __init__(self, weight_version: int, *, on_disk: OnDisk | None = None, stream: WeightStream | None = None):
        self.weight_version = weight_version
        self.superseded = asyncio.Event()
        """Set when other weights take their place."""
        self._on_disk, self._stream = on_disk, stream
        self._writing: asyncio.Task[OnDisk | None] | None = None
        self._checksums = dict(on_disk.checksums) if on_disk else {}
        self._computing: dict[ServerInfo, asyncio.Task[Checksums]] = {}

    @property
    def label(self) -> str:
        """The servers' name of these weights."""
        return str(self.weight_version)

    def know(self, checksums: Mapping[ServerInfo, Checksums]) -> None:
        """Takes the trainer's checksums, by kind of server."""
        self._checksums |= checksums

    async def folder(self) -> Path | None:
        """Where they are on disk; written now if need be. None: they are gone."""
        if self._on_disk is None and self._stream is not None:
            if self._writing is None or (self._writing.done() and self._writing.exception() is not None):
                self._writing = asyncio.ensure_future(self._stream.to_disk())
            self._on_disk = await asyncio.shield(self._writing)
            if self._on_disk is not None:
                self._checksums = {**self._on_disk.checksums, **self._checksums}
        return None if self._on_disk is None else self._on_disk.folder

    async def checksums(self, info: ServerInfo) -> Checksums:
        """For a kind of server that was not known in time, they are computed from the folder, once."""
        if info in self._checksums:
            return self._checksums[info]
        computing = self._computing.get(info)
        if computing is None or (computing.done() and computing.exception() is not None):
            folder = await self.folder()
            if folder is None:
                raise ServerUnavailable(f"weight version {self.weight_version} is gone: the trainer has newer ones")
            self._computing[info] = asyncio.ensure_future(asyncio.to_thread(expected_checksums, folder, info))
        return await asyncio.shield(self._computing[info])


class Publisher:
    """Holds the newest published weights and brings servers to them."""

    def __init__(
        self, members: Sequence[Member], balancer: Balancer, timing: Timing, *, sync_deadline_s: float
    ) -> None:
        """`sync_deadline_s`: for the checksums of weights that came without a file."""
        self.members = members
        self.balancer = balancer
        self.timing = timing
        self.sync_deadline_s = sync_deadline_s
        self.current: Published | None = None
        self.interruptions = 0
        """Publishes that ended running requests; tells a request whether its abort was ours."""
        self._one_at_a_time = asyncio.Lock()

    async def publish(self, weights: OnDisk, weight_version: int, fleet_deadline_s: float) -> PublishReport:
        """Every serving server holds the folder on return, verified; see `RolloutFleet.publish`."""
        folder = weights.folder.resolve()
        if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
            raise FileNotFoundError(f"{folder}: publish needs config.json and .safetensors files in one folder")
        weights = OnDisk(folder=folder, checksums=weights.checksums)
        published = Published(weight_version, on_disk=weights)

        async def update(serving: list[Member]) -> _Outcome:
            done = await _all_of([self._update(member, published, folder) for member in serving])
            return _Outcome(servers=_there(done), bytes=weights.bytes)

        return await self._while_closed(published, fleet_deadline_s, update)

    async def publish_stream(self, stream: WeightStream, weight_version: int, fleet_deadline_s: float) -> PublishReport:
        """The same without a folder; see `RolloutFleet.publish_stream`."""
        published = Published(weight_version, stream=stream)

        async def update(serving: list[Member]) -> _Outcome:
            started = time.monotonic()
            paused = _there(await _all_of([self._pause(member, published) for member in serving]))
            # As they are now: a server that is restarted meanwhile has another address.
            targets = [_target(member) for member in paused]
            try:
                with ExitStack() as stack:
                    for member in paused:
                        stack.enter_context(member.work())
                    sent = await stream.send(targets, published.label)
            except BaseException as error:
                for member in paused:
                    self._give_up(member, published, error)
                raise
            published.know(sent.checksums)
            failures = [sent.failures.get(target.url) for target in targets]
            pairs = zip(paused, targets, failures, strict=True)
            done = await _all_of([self._take(*each, published, started) for each in pairs])
            reasons = {url: failure.reason for url, failure in sent.failures.items()}
            return _Outcome(servers=_there(done), bytes=sent.bytes, by_disk=reasons)

        return await self._while_closed(published, fleet_deadline_s, update)

    async def _while_closed(
        self,
        published: Published,
        fleet_deadline_s: float,
        update: Callable[[list[Member]], Awaitable["_Outcome"]],
    ) -> PublishReport:
        """Updates the serving servers while no request starts."""
        async with self._one_at_a_time:
            started = time.monotonic()
            self.balancer.close()
            try:
                # From here on a server that comes back gets these weights too.
                if self.current is not None:
                    self.current.superseded.set()
                self.current = published
                serving = [member for member in self.members if member.serving]
                interrupted = sum(member.in_flight for member in serving)
                self.interruptions += interrupted > 0
                outcome = await update(serving)
                if not outcome.servers:
                    await self._any_ready(fleet_deadline_s)
            finally:
                self.balancer.open()
            return PublishReport(
                weight_version=published.weight_version,
                servers=outcome.servers,
                down=tuple(member.url for member in self.members if not member.serving),
                interrupted=interrupted,
                seconds=time.monotonic() - started,
                bytes=outcome.bytes,
                by_disk=outcome.by_disk,
            )

    async def bring_up_to_date(self, member: Member) -> None:
        """Gives a server that just started the newest weights and marks it READY.

        It reads them from disk, whatever way they were published. When they are on no disk and the trainer has begun to
        change them, it waits for the next ones.
        """
        while True:
            published = self.current
            if published is not None:
                folder = await published.folder()
                if folder is None:
                    member.reason = f"weight version {published.weight_version} is gone; it waits for the next publish"
                    await published.superseded.wait()
                    continue
                await self._load(member, published, folder)
            if published is self.current:
                member.enter(State.READY)
                self.balancer.dispatch()
                return

    async def _update(self, member: Member, published: Published, folder: Path) -> ServerPublish | None:
        """None if the server failed; the supervisor restarts it then."""
        started = time.monotonic()

        async def update() -> int:
            await self._drain(member)
            return await member.call(self._load(member, published, folder))

        tensors = await self._or_down(member, published, update())
        return None if tensors is None else _report(member, tensors, started)

    async def _pause(self, member: Member, published: Published) -> Member | None:
        """The member, drawing nothing; None if it failed."""

        async def pause() -> Member:
            await self._drain(member)
            if member.info is None:
                member.info = await member.call(member.client.server_info())
            await member.call(self._stop_drawing(member))
            return member

        return await self._or_down(member, published, pause())

    async def _take(
        self, member: Member, target: Target, failure: Failure | None, published: Published, started: float
    ) -> ServerPublish | None:
        """Lets a server that was sent the weights serve again, once they are verified. One that did not get them, but
        answers, reads them from disk. None for one that was restarted meanwhile: its supervisor sees to it."""
        if member.restarts != target.starts or not member.serving:
            return None

        async def take() -> int:
            if failure is None:
                # Over NCCL this is the first answer that comes after the data, if that comes at all.
                return await member.call(self._serve(member, published, self.sync_deadline_s))
            if not failure.answers:
                raise ServerUnavailable(failure.reason)
            folder = await published.folder()
            assert folder is not None, "the trainer waits for this publish"
            return await member.call(self._load(member, published, folder))

        tensors = await self._or_down(member, published, take())
        return None if tensors is None else _report(member, tensors, started)

    async def _or_down(self, member: Member, published: Published, work: Coroutine[Any, Any, T]) -> T | None:
        """None if the server failed; the supervisor restarts it then."""
        try:
            return await work
        except BaseException as error:
            self._give_up(member, published, error)
            if isinstance(error, ServerUnavailable):
                return None
            raise

    def _give_up(self, member: Member, published: Published, error: BaseException) -> None:
        if member.serving:  # paused, perhaps with other weights: it must not serve
            member.enter(State.DOWN, f"publish of version {published.weight_version}: {error}")

    async def _drain(self, member: Member) -> None:
        """Ends what the server draws; each request keeps its tokens and waits for the balancer to open.

        Letting requests run on (SGLang's in-place pause) is not enough: the cache cannot be flushed while they hold it,
        so new requests would read keys and values of the old weights, and it would be unknown which tokens are new.
        """
        deadline = time.monotonic() + self.timing.control_deadline_s
        again = 0.0
        while member.in_flight:
            now = time.monotonic()
            if now > deadline:
                raise ServerUnavailable(f"{member.url}: {member.in_flight} requests did not end on abort")
            if now > again:  # one that is still on its way to the server is not ended by the first call
                await member.call(member.client.abort(None))
                again = now + _ABORT_AGAIN_S
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _stop_drawing(self, member: Member) -> None:
        """Pauses it. A server that others run may hold requests that are not this fleet's, of a run that was killed
        perhaps, in the middle of a publish even: they would stay in the paused server, and its cache with them."""
        if not member.engine.ours:
            await member.client.resume()
            await member.client.abort(None)
            await member.client.flush_cache()  # waits until they have ended
        await member.client.pause()

    async def _load(self, member: Member, published: Published, folder: Path) -> int:
        """Loads from disk and verifies; the number of checksums compared."""
        if member.info is None:
            member.info = await member.client.server_info()
        checksums = asyncio.ensure_future(published.checksums(member.info))
        try:
            await self._stop_drawing(member)
            with member.work():
                await member.client.update_weights_from_disk(folder, published.label, self.timing.load_deadline_s)
            return await self._serve(member, published, self.timing.load_deadline_s)
        finally:
            checksums.cancel()

    async def _serve(self, member: Member, published: Published, deadline_s: float) -> int:
        """Verifies a paused server that holds the weights, and lets it go on; the number of checksums compared."""
        assert member.info is not None
        await member.client.flush_cache()
        with member.work():
            reported = await member.client.checksums(deadline_s)
        verify(await published.checksums(member.info), reported, member.url)
        await member.client.resume()
        member.weight_version, member.weight_label = published.weight_version, published.label
        return sum(len(names) for names in reported.values())

    async def _any_ready(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not any(member.state is State.READY for member in self.members):
            now = time.monotonic()
            # After a broken process group all of them may have been restarted, which takes as long as a start.
            if now > deadline and all(member.returns_by < now for member in self.members):
                raise FleetLost(f"publish: no server within {deadline_s:g} s\n{describe(self.members)}")
            await asyncio.sleep(_DRAIN_POLL_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    servers: tuple[ServerPublish, ...]
    bytes: int
    by_disk: Mapping[str, str] = field(default_factory=dict)


def _report(member: Member, tensors: int, started: float) -> ServerPublish:
    return ServerPublish(url=member.url, tensors=tensors, seconds=time.monotonic() - started)


def _target(member: Member) -> Target:
    assert member.info is not None
    return Target(url=member.url, info=member.info, starts=member.restarts)


def _there(results: Sequence[T | None]) -> tuple[T, ...]:
    return tuple(result for result in results if result is not None)


async def _all_of(updates: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all; the first error, once all have ended."""
    results = await asyncio.gather(*updates, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def describe(members: Sequence[Member]) -> str:
    """Each server's state and the tail of its log, for errors."""
    now = time.monotonic()
    return "\n".join(
        f"{member.url}: {member.state} for {now - member.since:.0f} s: {member.reason}\n{member.engine.log_tail()}"
        for member in members
    )
