"""New weights on every server, each checked tensor by tensor before it serves."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.balancer import Balancer, Member, State
from rollout.checksums import Checksums, expected_checksums, verify
from rollout.client import ServerInfo
from rollout.errors import FleetLost, ServerUnavailable
from rollout.timing import Timing

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
    folder: Path
    servers: tuple[ServerPublish, ...]
    down: tuple[str, ...]
    interrupted: int
    """Responses that were being drawn; they go on with the new weights, after the tokens they have."""
    seconds: float


@dataclass(slots=True)
class Published:
    """Weights that every server must hold, and their checksums as each kind of server reports them."""

    folder: Path
    weight_version: int
    expected: dict[ServerInfo, "asyncio.Task[Checksums]"] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The servers' name of these weights."""
        return str(self.weight_version)

    async def checksums(self, info: ServerInfo) -> Checksums:
        """Computed once for each kind of server."""
        if info not in self.expected:
            self.expected[info] = asyncio.ensure_future(asyncio.to_thread(expected_checksums, self.folder, info))
        return await asyncio.shield(self.expected[info])


class Publisher:
    """Holds the newest published weights and brings servers to them."""

    def __init__(self, members: Sequence[Member], balancer: Balancer, timing: Timing) -> None:
        self.members = members
        self.balancer = balancer
        self.timing = timing
        self.current: Published | None = None
        self.interruptions = 0
        """Publishes that ended running requests; tells a request whether its abort was ours."""
        self._one_at_a_time = asyncio.Lock()

    async def publish(self, folder: Path, weight_version: int, fleet_deadline_s: float) -> PublishReport:
        """Every serving server holds `folder` on return, verified; see `RolloutFleet.publish`."""
        async with self._one_at_a_time:
            started = time.monotonic()
            folder = folder.resolve()
            if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
                raise FileNotFoundError(f"{folder}: publish needs config.json and .safetensors files in one folder")
            published = Published(folder, weight_version)
            self.balancer.close()
            try:
                # From here on a server that comes back gets these weights too.
                self.current = published
                serving = [member for member in self.members if member.serving]
                interrupted = sum(member.in_flight for member in serving)
                self.interruptions += interrupted > 0
                done = await _all_of([self._update(member, published) for member in serving])
                if not any(done):
                    await self._any_ready(fleet_deadline_s)
            finally:
                self.balancer.open()
            return PublishReport(
                weight_version=weight_version,
                folder=folder,
                servers=tuple(report for report in done if report is not None),
                down=tuple(member.url for member in self.members if not member.serving),
                interrupted=interrupted,
                seconds=time.monotonic() - started,
            )

    async def bring_up_to_date(self, member: Member) -> None:
        """Gives a server that just started the newest weights and marks it READY."""
        while True:
            published = self.current
            if published is not None:
                await self._load(member, published)
            if published is self.current:
                member.enter(State.READY)
                self.balancer.dispatch()
                return

    async def _update(self, member: Member, published: Published) -> ServerPublish | None:
        """None if the server failed; the supervisor restarts it then."""
        started = time.monotonic()
        try:
            await self._drain(member)
            tensors = await member.call(self._load(member, published))
        except BaseException as error:
            if member.serving:  # paused, perhaps with other weights: it must not serve
                member.enter(State.DOWN, f"publish of version {published.weight_version}: {error}")
            if isinstance(error, ServerUnavailable):
                return None
            raise
        return ServerPublish(url=member.url, tensors=tensors, seconds=time.monotonic() - started)

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

    async def _load(self, member: Member, published: Published) -> int:
        """Loads and verifies; the number of checksums compared."""
        if member.info is None:
            member.info = await member.client.server_info()
        checksums = asyncio.ensure_future(published.checksums(member.info))
        client, deadline_s = member.client, self.timing.load_deadline_s
        try:
            await client.pause()
            await client.update_weights_from_disk(published.folder, published.label, deadline_s)
            await client.flush_cache()
            reported = await client.checksums(deadline_s)
            verify(await checksums, reported, member.url)
            await client.resume()
        finally:
            checksums.cancel()
        member.weight_version, member.weight_label = published.weight_version, published.label
        return sum(len(names) for names in reported.values())

    async def _any_ready(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not any(member.state is State.READY for member in self.members):
            if time.monotonic() > deadline:
                raise FleetLost(f"publish: no server within {deadline_s:g} s\n{describe(self.members)}")
            await asyncio.sleep(_DRAIN_POLL_S)


async def _all_of(updates: list[Coroutine[Any, Any, ServerPublish | None]]) -> list[ServerPublish | None]:
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
