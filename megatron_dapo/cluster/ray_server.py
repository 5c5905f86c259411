"""A server on whatever node of the Ray cluster has its place: an actor there starts and watches the process."""

import asyncio
import time
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


class ServerHost:
    """Body of the Ray actor: one server process, which ends with the actor."""

    def __init__(self, config: RolloutConfig, spec: ServerSpec) -> None:
        if config.host in NOT_REACHED:  # the coordinator may be on another node
            config = replace(config, host=ray.util.get_node_ip_address())
        self._server = LocalServer(config, spec)

    async def start(self) -> str:
        """The server's URL once its process has been started."""
        await self._server.start()
        return self._server.url

    async def restart(self) -> str:
        await self._server.restart()
        return self._server.url

    async def alive(self) -> bool:
        return self._server.alive()

    async def killed(self) -> bool:
        return self._server.killed()

    async def close(self) -> None:
        await self._server.close()


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
        self._alive = False
        self._killed = False
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
        on_gpu = self._spec.device == "cuda"
        gpus, spec = self._config.tensor_parallel if on_gpu else 0, self._spec
        if self._shared_gpus is not None:
            gpus, spec = 0, replace(spec, gpus=await self._shared_gpus())
        cpus = 1 if on_gpu else self._config.tensor_parallel
        remote = ray.remote(ServerHost)
        self._host = remote.options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, **self._placement.at(self._bundle)
        ).remote(self._config, spec)
        try:
            self._url = await self._ask(self._host.start.remote(), START_DEADLINE_S)
        except BaseException:
            self.kill()
            raise
        self._alive = True
        self._watch = asyncio.create_task(self._look())

    def alive(self) -> bool:
        return self._alive

    def killed(self) -> bool:
        return self._killed

    def log_tail(self) -> str:
        """The run directory is on a file system that all nodes see."""
        return tail(Path(self._spec.log_path))

    async def restart(self) -> None:
        self._stop_looking()
        if self._host is None:  # it was closed, or killed
            await self.start()
            return
        try:
            self._url = await self._ask(self._host.restart.remote())
        except ServerStartError:  # the actor or its node is gone
            self.kill()
            await self.start()
            return
        self._alive = True
        self._watch = asyncio.create_task(self._look())

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
                await self._ask(self._host.close.remote())
        self.kill()

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
        deadline = time.monotonic() + PLACE_DEADLINE_S
        while not await self._stands():
            if time.monotonic() > deadline:
                raise ServerStartError(
                    f"server {self._spec.index}: its node is gone, and no other node of the Ray cluster has room for "
                    f"rollout.tensor_parallel = {self._config.tensor_parallel}; give the cluster another node"
                )
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _stands(self) -> bool:
        try:
            return await asyncio.to_thread(self._placement.stands, self._bundle)
        except ray.exceptions.RayError as error:
            raise ServerStartError(f"server {self._spec.index}: Ray does not say where it may start: {error}") from None

    async def _ask(self, reference: Any, deadline_s: float = ANSWER_DEADLINE_S) -> Any:
        """ServerStartError with the actor's own words when it fails, is lost or does not answer."""
        try:
            async with asyncio.timeout(deadline_s):
                return await reference
        except TimeoutError:
            raise ServerStartError(
                f"server {self._spec.index}: its Ray actor gave no answer within {deadline_s:g} s"
            ) from None
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise ServerStartError(f"server {self._spec.index}: {cause}") from None
