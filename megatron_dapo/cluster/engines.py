"""Which servers a run uses: running ones by URL, new ones on this machine, or new ones that Ray places on a cluster.

A server that Ray places is started and watched by an actor on whatever node has its place; one that is larger than a
node by an actor on each of its nodes. They start and end together.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray

from megatron_dapo.cluster.placement import Placement, PlacementError, natural
from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.config import Config
from megatron_dapo.monitor.console import Count
from rollout.config import RolloutConfig
from rollout.errors import ServerStartError
from rollout.fleet.fleet import RolloutFleet
from rollout.fleet.member import State
from rollout.server.engine import Engine, LocalServer, RemoteServer, hold_port, tail
from rollout.server.server_command import Secret, ServerSpec, new_key, read_key

LOOK_INTERVAL_S = 1.0
ANSWER_DEADLINE_S = 60.0
"""For the actor to end its process: it does nothing else."""
START_DEADLINE_S = 180.0
"""For a new actor to start its process: Python and what it imports may come from a shared file system."""
PLACE_DEADLINE_S = 60.0
"""For Ray to find another node for a server whose node is gone."""
_ROOM = "no other node of the Ray cluster has room for rollout.tensor_parallel GPUs or CPUs"
NO_NODE = f"its node is gone, and {_ROOM}; give the cluster another. None came"
RANK_TITLE = "sglang::sched"
"""The kernel keeps 15 characters of a process's title."""
NOT_REACHED = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::")

KEY_FILE = ".server-key"
"""In the run directory, which every node sees, until the servers have ended."""


def visible_gpus(count: int) -> tuple[str, ...]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES knows them.

    Args:
        count: `torch.cuda.device_count()`.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in named.split(",")] if named is not None else [str(at) for at in range(count)]
    return tuple(names[:count])


def own_engines(config: Config, logs: Path, *, gpus: Sequence[str]) -> list[Engine]:
    """The servers of `rollout.urls`, or `rollout.servers` of this machine's own, not yet started.

    Args:
        logs: folder of the servers' logs.
        gpus: the servers take the first of them; none: they are on the CPU.

    Raises:
        PlacementError: they need more GPUs.
    """
    if config.rollout.urls:
        return [RemoteServer(url) for url in config.rollout.urls]
    each, servers = config.rollout.tensor_parallel, config.rollout.servers
    if gpus and servers * each > len(gpus):
        asked = f"rollout.servers x rollout.tensor_parallel = {servers * each} GPUs; there are {len(gpus)} for them"
        raise PlacementError(f"{asked} (CUDA_VISIBLE_DEVICES); lower one of the two, e.g. rollout.servers=1")
    specs = [_spec(config, logs, at, on_gpu=bool(gpus), gpus=_share(gpus, at, each)) for at in range(servers)]
    return [LocalServer(config.rollout, spec) for spec in specs]


def servers_ready(fleet: RolloutFleet) -> Count:
    """How many servers of a fleet that starts are ready."""
    return Count(sum(member.state is State.READY for member in fleet.members), len(fleet.engines), "servers")


def gpus_for_servers(config: Config, gpus: Sequence[str]) -> Sequence[str]:
    """Those of this machine that servers may take when the trainer takes the first ones: the ones after them, or with
    `run.mode: colocated` the same ones.

    Raises:
        PlacementError, ConfigError: trainer and servers need more GPUs than there are, or cannot share them.
    """
    trainer, each, servers = config.actor.layout.world_size, config.rollout.tensor_parallel, config.rollout.servers
    if not gpus or config.rollout.urls:
        return ()
    shared = config.run.mode == "colocated"
    if shared:
        config.check_shared_gpus()
    # One GPU is for both: rollout.memory_fraction says how much of it the server takes.
    behind = 0 if shared or len(gpus) == trainer == each == servers == 1 else trainer
    if trainer > len(gpus) or behind + servers * each > len(gpus):
        remedy = "lower one of them or name running servers in rollout.urls"
        more = f"rollout.servers x rollout.tensor_parallel = {servers * each} {'of them' if shared else 'more'}"
        raise PlacementError(f"actor.layout needs {trainer} GPUs and {more}; this machine offers {len(gpus)}; {remedy}")
    # Ranks are numbered by the names of their GPUs: `cluster.placement.by_node_and_gpu`.
    return sorted(gpus[:trainer], key=natural) if shared else gpus[behind:]


def _share(gpus: Sequence[str], index: int, each: int) -> tuple[str, ...]:
    return tuple(gpus[index * each : (index + 1) * each])


def placed_engines(config: Config, logs: Path, placement: Placement, trainer: Trainer, *, on_gpu: bool) -> list[Engine]:
    """A server in each of the placement's places for servers. Ray says which GPUs it sees, or with `run.mode:
    colocated` the trainer's ranks do, which have started by then."""
    beside = trainer if config.run.mode == "colocated" and on_gpu else None
    return [
        RayServer(config.rollout, _spec(config, logs, index, on_gpu=on_gpu), placement, bundles, beside)
        for index, bundles in enumerate(placement.servers)
    ]


def api_key(config: Config, run_path: Path) -> Secret | None:
    """What the run's servers ask for; for servers that the run starts it is made anew.

    Raises:
        KeyFileError: `rollout.api_key_file` cannot be used.
    """
    file = key_file(config, run_path)
    if not config.rollout.urls:
        new_key(run_path / KEY_FILE)
    return None if file is None else read_key(file)


def key_file(config: Config, run_path: Path) -> Path | None:
    """Where that key is; None if the servers of `rollout.urls` ask for none."""
    if config.rollout.urls:
        return Path(config.rollout.api_key_file).resolve() if config.rollout.api_key_file else None
    return run_path.resolve() / KEY_FILE


def _spec(config: Config, logs: Path, index: int, *, on_gpu: bool, gpus: tuple[str, ...] = ()) -> ServerSpec:
    draft = config.rollout.speculative.draft_model
    if not on_gpu and (config.rollout.speculates or config.rollout.quantization != "none"):
        raise PlacementError(
            "rollout.speculative, rollout.quantization: need GPUs, and there is none here; set the algorithm to off, "
            f"quantization to none, and take weights that are not in FP8 themselves ({config.model.path})"
        )
    return ServerSpec(
        model_path=Path(config.model.path).resolve(),
        draft_model=Path(draft).resolve() if draft else None,
        device="cuda" if on_gpu else "cpu",
        dtype=config.model.dtype,
        fp32_head=config.model.upcasts_head,
        routed_experts=config.actor.routing_replay,
        context_length=config.model.context_length,
        seed=(config.run.seed + index) % 2**32,
        log_path=logs / f"server{index}.log",
        api_key_file=logs.parent / KEY_FILE,
        index=index,
        shares_memory=config.run.mode == "colocated",
        gpus=gpus,
    )


class ServerHost(LocalServer):
    """Body of the Ray actor: one server process, or that of one node of a server, which ends with the actor."""

    def __init__(self, config: RolloutConfig, spec: ServerSpec) -> None:
        if config.host in NOT_REACHED:  # the coordinator may be on another node
            config = replace(config, host=ray.util.get_node_ip_address())
        if spec.node_rank:  # nobody but SGLang's own health check asks there
            config = replace(config, port=0)
        super().__init__(config, spec)
        self._meeting: socket.socket | None = None

    def meeting(self) -> str:
        """Where the processes of a server on several nodes can meet, at this one, held while the actor lives."""
        self._meeting = hold_port(replace(self.config, port=0), self.spec.index)
        return f"{self.config.host}:{self._meeting.getsockname()[1]}"

    async def begin(self, meeting: str = "") -> str:
        """Starts the process. Returns its URL."""
        self.spec = replace(self.spec, meeting=meeting)
        await self.start()
        return self.url

    def alive(self) -> bool:
        """Of a further node's part also whether every rank lives: SGLang looks at its first one alone there."""
        if self.spec.node_rank == 0 or self.process is None or not super().alive():
            return super().alive()
        ended = [each for each in psutil.Process(self.process.pid).children() if each.status() == psutil.STATUS_ZOMBIE]
        return not any(each.name().startswith(RANK_TITLE) for each in ended)


@dataclass(eq=False)
class RayServer:
    """Engine (rollout.server.engine): the coordinator's side of a ServerHost, or of one on each of a server's nodes. If
    one is lost, all are ended and made anew: no rank can go on without the others."""

    config: RolloutConfig
    spec: ServerSpec
    placement: Placement
    bundles: Sequence[int]
    beside: Trainer | None
    """Whose GPUs in the bundle the server uses too, at each start; None: Ray gives it its own."""
    ours = True

    def __post_init__(self) -> None:
        self._hosts: list[Any] = []
        self.url, self._alive = f"http://server{self.spec.index}.not-started", False
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts it in its places, which Ray moves when a node is gone and another one has room.

        Raises:
            ServerStartError: no node has room now, or the actor failed or did not answer. `restart` tries again.
        """
        await self._ask(self._placed(), PLACE_DEADLINE_S, NO_NODE)
        nodes, spec = len(self.bundles), self.spec
        on_gpu, gpus = spec.device == "cuda", self.config.tensor_parallel // nodes
        if self.beside is not None:
            spec = replace(spec, gpus=_share(self.beside.gpus, spec.index, gpus))
        own = gpus if on_gpu and self.beside is None else 0
        cpus = 1 if on_gpu else gpus
        for bundle, part in zip(self.bundles, spec.on_nodes(nodes), strict=True):
            place = self.placement.at(bundle)
            actor = ray.remote(ServerHost).options(num_cpus=cpus, num_gpus=own, max_restarts=0, **place)
            self._hosts.append(actor.remote(self.config, part))
        first = self._hosts[0]
        try:
            meeting = await self._ask(first.meeting.remote(), START_DEADLINE_S) if nodes > 1 else ""
            urls = asyncio.gather(*(host.begin.remote(meeting) for host in self._hosts))
            self.url = (await self._ask(urls, START_DEADLINE_S))[0]
        except BaseException:
            self.kill()
            raise
        self._alive, self._watch = True, asyncio.create_task(self._look())

    def alive(self) -> bool:
        return self._alive

    def log_tail(self) -> str:
        """The run directory is on a file system that all nodes see."""
        return "\n".join(tail(part.log_path) for part in self.spec.on_nodes(len(self.bundles)))

    async def restart(self, weights: tuple[Path, str] | None = None) -> None:
        """By a new actor, whatever has become of the old one and its node."""
        await self.close()
        self.spec = self.spec.starting_with(weights)
        await self.start()

    def kill(self) -> None:
        """The kernel ends the server when its actor ends."""
        self._alive = False
        if self._watch is not None:
            self._watch.cancel()
        while self._hosts:
            ray.kill(self._hosts.pop())

    async def close(self) -> None:
        asked = [self._ask(host.close.remote(), ANSWER_DEADLINE_S) for host in self._hosts]
        await asyncio.gather(*asked, return_exceptions=True)  # some may be gone already
        self.kill()

    async def _look(self) -> None:
        while self._alive:
            try:
                self._alive = all(await asyncio.gather(*(host.alive.remote() for host in self._hosts)))
            except ray.exceptions.RayError:  # with its actor or its node
                self._alive = False
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _placed(self) -> None:
        for bundle in self.bundles:
            while not await asyncio.to_thread(self.placement.stands, bundle):
                await asyncio.sleep(LOOK_INTERVAL_S)

    async def _ask(self, answer: Awaitable[Any], deadline_s: float, silent: str = "its Ray actor is silent") -> Any:
        """ServerStartError with the actor's own words when it fails or is lost, with `silent` when nothing comes."""
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            cause: object = f"{silent} within {deadline_s:g} s"
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
        raise ServerStartError(f"server {self.spec.index}: {cause}")
