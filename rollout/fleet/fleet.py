"""The servers as one: a response to every request and weights to every server, even when single servers fail."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path

from rollout.config import RolloutConfig
from rollout.errors import RolloutError
from rollout.fleet.balancer import Balancer
from rollout.fleet.member import Member, ServerStatistics, State, Timing
from rollout.fleet.request_loop import Draw, RequestLoop
from rollout.fleet.supervision import Supervisor
from rollout.fleet.weight_update import OnDisk, Publisher, PublishReport, WeightStream
from rollout.generation import Generation, GenerationRequest, ServedPart
from rollout.server.engine import Engine
from rollout.weights.checksums import Checksums
from rollout.wire.client import ServerInfo, SglangClient


@dataclass(eq=False, repr=False)
class RolloutFleet:
    """Answers requests with one or more SGLang servers, and keeps these alive.

    All methods belong to one event loop, whose thread lives as long as the fleet.
    """

    config: RolloutConfig
    engines: Sequence[Engine]
    """At least one."""
    _: KW_ONLY
    vocab_size: int
    """Rows of the model's embedding."""
    report: Callable[[str], None]
    """Gets a line whenever a server fails or comes back."""
    timing: Timing = field(default_factory=Timing)
    fp32_head: bool = False
    """Whether the trainer's output layer calculates in float32; servers in another type must do so too, or must not."""
    routed_experts: bool = False
    """Whether requests ask for `routing`: every server must be able to tell it."""
    api_key: str | None = None
    """What the servers ask for; None: nothing."""
    observe: Callable[[ServedPart], None] = lambda part: None
    """Gets every answer of a server to a request."""
    statistics: ServerStatistics = field(default_factory=ServerStatistics, init=False)
    """What the servers say of their work; the caller takes it."""
    members: tuple[Member, ...] = field(default=(), init=False)
    """The servers in the order of `engines`, each with its state, once `start` was called."""

    async def start(self, deadline_s: float) -> None:
        """Starts the engines and returns when every one answers, or enough of them (`rollout.start_quorum`).

        A server that is restarted later has `deadline_s` too.

        Raises:
            ServerStartError: names each server that is not ready, or ended twice, with the tail of its log. All servers
                are ended then. `ServerUnfit`: one can never be used.
        """
        config, timing = self.config, self.timing
        request_s, control_s, key = config.request_deadline_s, timing.control_deadline_s, self.api_key
        connect = partial(SglangClient, request_deadline_s=request_s, control_deadline_s=control_s, api_key=key)
        self.members = tuple(Member(engine, connect) for engine in self.engines)
        balancer = self._balancer = Balancer(self.members, config.max_running_requests)
        publisher = self._publisher = Publisher(config, timing, balancer)
        self._requests = RequestLoop(config, timing, balancer, self.vocab_size, self._served)
        others = self.report, deadline_s, self.fp32_head, self.routed_experts, self.statistics
        supervisor = self._supervisor = Supervisor(config, timing, self.members, balancer, publisher, *others)
        try:
            await supervisor.start_all()
        except Exception:
            await self.close()
            raise
        supervisor.watch()

    async def generate(self, request: GenerationRequest) -> Generation:
        """One response. Waits for a free place at a server, and survives publishes and the loss of servers.

        A publish interrupts the response; it goes on from the tokens it has, so each token has one weight version
        (`rollout.on_publish`).
        After the loss of its server it goes on at another one, from what the first had streamed
        (`rollout.stream_every`).

        Raises:
            ValueError: a token id outside the vocabulary, which would crash a server.
            ServerRefused: the server calls the request wrong, for example longer than its context.
            RolloutError: `max_attempts` servers failed on it; with the last one's words.
            FleetLost: no server for `fleet_deadline_s`.
        """
        return await self._requests.generate(request)

    async def lend(self, request: GenerationRequest, draw: Draw) -> None:
        """The same, drawn by another process, which gets one server after the other; of an episode all its turns
        (`RequestLoop.lend`). Raises as `generate`, and what `draw` raises."""
        await self._requests.lend(request, draw)

    async def publish(
        self, folder: Path, weight_version: int, checksums: Mapping[ServerInfo, Checksums] | None = None
    ) -> PublishReport:
        """Gives every server the weights in `folder` and returns when the checksum of every tensor is as computed here.

        `rollout.on_publish` says whether the fleet stops meanwhile, and how running requests go on. A server that fails
        is restarted and gets the weights before it serves again; at least one must serve on return.

        Args:
            folder: Hugging Face layout (config.json, .safetensors), which the servers can read at the same path. It
                must stay until the next publish: servers that restart load it.
            weight_version: what `Generation.weight_versions` says from now on.
            checksums: those of the trainer, by kind of server (`kinds`). For other kinds they are computed from the
                folder.

        Raises:
            WeightMismatch: a server holds other weights; names the tensors.
            ServerRefused: a server cannot load the folder.
            FileNotFoundError, ValueError: the folder is incomplete, or the model's checksums are not known.
            FleetLost: no server within `fleet_deadline_s`.
        """
        return await self._publisher.publish(OnDisk(folder=folder.resolve(), checksums=checksums or {}), weight_version)

    async def publish_stream(self, stream: WeightStream, weight_version: int) -> PublishReport:
        """The same for weights that the trainer sends from its memory, to servers that are paused before it begins.

        A server that is restarted, or that did not get all of them, reads them from a folder that the trainer writes
        for it.

        Raises:
            As `publish`, and what `stream` raises.
        """
        return await self._publisher.publish(stream, weight_version)

    @property
    def kinds(self) -> tuple[ServerInfo, ...]:
        """What the servers say of themselves, each kind once."""
        return tuple(dict.fromkeys(member.info for member in self.members if member.info is not None))

    def load(self) -> tuple[int, int, float]:
        """Tokens that the servers have drawn since the start, with those that they have streamed of running responses;
        running responses; seconds since the oldest of these was asked for. What a server is lent for runs until it is
        back, and counts then."""
        return self._requests.load()

    def _served(self, part: ServedPart) -> None:
        self.statistics.served(part)
        self.observe(part)

    async def hold(self) -> None:
        """Interrupts all responses that are drawn and returns when no server draws. Requests that are `holdable`, later
        ones too, wait with their tokens until `let_go`, whatever is published or released meanwhile; the time counts
        towards no deadline. Others go on."""
        await self._publisher.hold()

    def let_go(self) -> None:
        """Ends `hold`: what was kept back goes on with the weights that the servers hold by now."""
        self._balancer.let_go()

    def so_far(self, request_id: str) -> Generation | None:
        """What was drawn of a response that is under way, with what its server has streamed; None: nothing. It ends by
        ABORT unless it is complete."""
        return self._requests.so_far(request_id)

    async def release_memory(self) -> tuple[float | None, ...]:
        """Every server leaves its accelerators' memory; requests wait until `resume_memory`.

        Returns:
            Of each server, the GB that it says it gave back. None: it could not; it was ended, and is restarted by
            `resume_memory`.

        Raises:
            RolloutError: a request is in flight.
        """
        return await self._supervisor.release_memory()

    async def resume_memory(self, *, weights_only: bool = False) -> None:
        """The servers take back what they left, weights included, and serve.

        Args:
            weights_only: first only the memory of the weights, for a publish; they serve after a second call.
        """
        await self._supervisor.resume_memory(weights_only=weights_only)

    async def close(self) -> None:
        """Ends the servers that this fleet started, and every wait for one. May be called twice."""
        if self.members:
            await self._supervisor.close()
            self._balancer.end(RolloutError("the fleet was closed"))
            for member in self.members:
                member.enter(State.DOWN, "the fleet was closed")
            await self._requests.close()
        await asyncio.gather(*(member.forget_client() for member in self.members))
        closed = await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for error in filter(None, closed):  # raised once all engines are closed
            raise error
