"""A server on whatever node of the Ray cluster has its place: an actor there starts and watches the process."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from megatron_dapo.cluster.placement import Placement
from rollout.config import RolloutConfig
from rollout.errors import ServerStartError
from rollout.server.engine import LocalServer, tail
from rollout.server.server_command import ServerSpec

LOOK_INTERVAL_S = 1.0
ANSWER_DEADLINE_S = 60.0
"""For the actor to restart or end its process: it does nothing else."""
START_DEADLINE_S = 180.0
"""For a new actor to start its process: Python and what it imports may come from a shared file system."""
PLACE_DEADLINE_S = 60.0
"""For Ray to find another node for a server whose node is gone."""
NOT_REACHED = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::")


class ServerHost(LocalServer):
    """Body of the Ray actor: one server process, which ends with the actor."""

    def __init__(self, config: RolloutConfig, spec: ServerSpec) -> None:
        if config.host in NOT_REACHED:  # the coordinator may be on another node
            config = replace(config, host=ray.util.get_node_ip_address())
        super().__init__(config, spec)

    async def begin(self) -> str:
        """Ends what is left of the process and starts it anew. Returns its URL."""
        await self.restart()
        return self.url


class RayServer:
    """Engine (rollout.server.engine): the coordinator's side of a ServerHost. An actor that was lost is made anew."""

    ours = True

    def __init__(
        self,
        config: RolloutConfig,
        spec: ServerSpec,
        placement: Placement,
        bundle: int,
        *,
        shared_gpus: Callable[[], Awaitable[tuple[str, ...]]] | None = None,
    ) -> None:
        """`shared_gpus`: asked at each start for the GPUs of others in the bundle that the server uses too; None: Ray
        gives it its own."""
        self._config, self._spec, self._placement, self._bundle = config, spec, placement, bundle
        self._shared_gpus = shared_gpus
        self._host: Any = None
        self._url = f"http://server{spec.index}.not-started"
        self._alive = self._killed = False
        self._watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self._url

    async def start(self) -> None:
        """Starts it in its place, which Ray moves when the node is gone and another one has room.

        Raises:
            ServerStartError: no node has room now, or the actor failed or did not answer. `restart` tries again.
        """
        await self._placed()
        on_gpu, gpus, spec = self._spec.device == "cuda", self._config.tensor_parallel, self._spec
        if self._shared_gpus is not None:
            spec = replace(spec, gpus=await self._shared_gpus())
        options = {
            "num_cpus": 1 if on_gpu else gpus,
            "num_gpus": gpus if on_gpu and self._shared_gpus is None else 0,
            "max_restarts": 0,
        }
        actor = ray.remote(ServerHost).options(**options, **self._placement.at(self._bundle))
        self._host = actor.remote(self._config, spec)
        try:
            await self._begin(START_DEADLINE_S)
        except BaseException:
            self.kill()
            raise

    def alive(self) -> bool:
        return self._alive

    def killed(self) -> bool:
        return self._killed

    def log_tail(self) -> str:
        """The run directory is on a file system that all nodes see."""
        return tail(Path(self._spec.log_path))

    async def restart(self) -> None:
        self._stop_looking()
        if self._host is not None:  # else it was closed, or killed
            try:
                await self._begin(ANSWER_DEADLINE_S)
                return
            except ServerStartError:  # the actor or its node is gone
                self.kill()
        await self.start()

    def kill(self) -> None:
        """The kernel ends the server when its actor ends."""
        self._stop_looking()
        self._alive = False
        if self._host is not None:
            ray.kill(self._host)
            self._host = None

    async def close(self) -> None:
        self._stop_looking()
        if self._host is not None:
            with suppress(ServerStartError):  # it is gone already
                await self._ask(self._host.close.remote(), ANSWER_DEADLINE_S)
        self.kill()

    async def _begin(self, deadline_s: float) -> None:
        self._url = await self._ask(self._host.begin.remote(), deadline_s)
        self._alive = True
        self._watch = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while self._alive:
            try:
                alive = await self._host.alive.remote()
                self._killed = not alive and await self._host.killed.remote()
                self._alive = alive
            except ray.exceptions.RayError:  # with its actor or its node
                self._killed, self._alive = True, False
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _stop_looking(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _placed(self) -> None:
        what, needed = f"server {self._spec.index}", self._config.tensor_parallel
        try:
            async with asyncio.timeout(PLACE_DEADLINE_S):
                while not await asyncio.to_thread(self._placement.stands, self._bundle):
                    await asyncio.sleep(LOOK_INTERVAL_S)
        except TimeoutError:
            raise ServerStartError(
                f"{what}: its node is gone, and no other node of the Ray cluster has room for "
                f"rollout.tensor_parallel = {needed}; give the cluster another node"
            ) from None
        except ray.exceptions.RayError as error:
            raise ServerStartError(f"{what}: Ray does not say where it may start: {error}") from None

    async def _ask(self, reference: Any, deadline_s: float) -> Any:
        """ServerStartError with the actor's own words when it fails, is lost or does not answer."""
        try:
            async with asyncio.timeout(deadline_s):
                return await reference
        except TimeoutError:
            cause: object = f"its Ray actor gave no answer within {deadline_s:g} s"
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
        raise ServerStartError(f"server {self._spec.index}: {cause}")
