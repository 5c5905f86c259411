"""A process that plays an SGLang server in a publish by process group: HTTP, and one thread for each scheduler.

It answers as the stand-in does, and takes weights by strict NCCL (or gloo) as SGLang 0.5.17: a broadcast over NCCL is
only enqueued, so the answer comes before the data; whatever needs the data waits for it, in the scheduler's one thread.
"""

import asyncio
import json
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import save_file
from torch.distributed import distributed_c10d

from rollout.weights.checksums import expected_checksums
from rollout.wire.client import ServerInfo
from tests import fork_server
from tests.emulated import strict_nccl
from tests.emulated.strict_board import PATIENCE
from tests.rollout.standin import StandIn

HANG_S = 600.0
"""What waits in a server's group waits longer than any test."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What befalls a server when it is asked for something: Fault(kind="kill", phase="bucket 1")"""

    kind: str
    """refuse: it answers 500. kill, stop: its process gets SIGKILL or SIGSTOP."""
    phase: str
    """join, "bucket N" (0 is the first one), label (the last bucket), loaded (the last one is there) or checksums."""


class Scheduler:
    """One rank of the server: its end of the groups, and the weights that it holds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._groups: dict[str, Any] = {}
        self._pending: list[tuple[Any, torch.Tensor, dict[str, Any]]] = []
        self._held: dict[str, torch.Tensor] = {}

    def join(self, asked: dict[str, Any], rank: int) -> None:
        """As SGLang's `init_custom_process_group`."""
        world, name = asked["world_size"], asked["group_name"]
        where = f"tcp://{asked['master_address']}:{asked['master_port']}"
        store, _, _ = next(dist.rendezvous(where, rank, world, timeout=timedelta(seconds=HANG_S)))
        store = dist.PrefixStore(name, store)
        if name in distributed_c10d._world.pg_names.values():  # by another scheduler of this process: torch admits one
            options = strict_nccl.Options()
            options.group_name = name
            inside = dist.PrefixStore("cuda/", dist.PrefixStore(f"{name}/", store))
            self._groups[name] = strict_nccl.StrictGroup(inside, rank, world, options)
            return
        self._groups[name], _ = distributed_c10d._new_process_group_helper(
            world,
            rank,
            [],
            distributed_c10d.Backend(asked["backend"]),
            store,
            group_name=name,
            backend_options=None,
            timeout=timedelta(seconds=HANG_S),
        )

    def leave(self, asked: dict[str, Any]) -> None:
        self._groups.pop(asked["group_name"]).shutdown()

    def take(self, asked: dict[str, Any]) -> None:
        """One bucket. Over NCCL it is there some time after this."""
        size = sum(torch.Size(shape).numel() for shape in asked["shapes"])
        flat = torch.empty(size * getattr(torch, asked["dtypes"][0]).itemsize, dtype=torch.uint8)
        group = self._groups[asked["group_name"]]
        work = group.broadcast([flat], dist.BroadcastOptions())
        self._pending.append((work, flat, asked))
        if not isinstance(group, strict_nccl.StrictGroup):
            self.synchronise()

    def synchronise(self) -> None:
        """Blocks until every bucket is there."""
        while self._pending:
            work, flat, asked = self._pending[0]
            work.wait()
            dtype = getattr(torch, asked["dtypes"][0])
            parts = flat.view(dtype).split([torch.Size(shape).numel() for shape in asked["shapes"]])
            shaped = [part.view(shape) for part, shape in zip(parts, asked["shapes"], strict=True)]
            self._held |= dict(zip(asked["names"], shaped, strict=True))
            del self._pending[0]

    def checksums(self, folder: Path | None, info: ServerInfo, rank: int) -> dict[str, str]:
        """Of what was sent, or else of what was loaded from `folder`."""
        self.synchronise()
        if self._held:
            save_file(
                {name: tensor.contiguous() for name, tensor in self._held.items()}, self._folder / "m.safetensors"
            )
        return expected_checksums(self._folder if self._held else folder, info)[rank]

    def forget(self) -> None:
        """Other weights come from disk."""
        self.synchronise()
        self._held = {}


class PlayedServer(StandIn):
    """The server's HTTP process, and its schedulers."""

    def __init__(self, folder: Path, info: ServerInfo, fault: Fault | None, model_config: str) -> None:
        super().__init__()
        self.info, self.fault = info, fault
        self.buckets = 0
        self.schedulers, self.threads = [], []
        for rank in range(info.tensor_parallel):
            home = folder / f"rank{rank}"
            home.mkdir(exist_ok=True)
            (home / "config.json").write_text(model_config)
            self.schedulers.append(Scheduler(home))
            self.threads.append(ThreadPoolExecutor(1))

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.post("/init_weights_update_group", self._join),
            web.post("/destroy_weights_update_group", self._leave),
            web.post("/update_weights_from_distributed", self._bucket),
        ]

    async def _all(self, call: Callable[[Scheduler, int], Any]) -> list[Any]:
        """Of every scheduler, behind what it was asked before."""
        loop = asyncio.get_running_loop()
        pairs = enumerate(zip(self.schedulers, self.threads, strict=True))
        work = [loop.run_in_executor(thread, call, scheduler, rank) for rank, (scheduler, thread) in pairs]
        return await asyncio.gather(*work)

    async def _first(self, call: Callable[[Scheduler], Any]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.threads[0], call, self.schedulers[0])

    def _stumble(self, *phases: str) -> None:
        if self.fault is None or self.fault.phase not in phases:
            return
        if self.fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)
        if self.fault.kind == "refuse":
            raise web.HTTPInternalServerError(text="planted")

    async def _join(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self._stumble("join")
        first = asked["rank_offset"]
        await self._first(lambda scheduler: scheduler.join(asked, first))
        await self._all(lambda scheduler, rank: rank and scheduler.join(asked, first + rank))
        return web.json_response({"success": True, "message": ""})

    async def _leave(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await self._all(lambda scheduler, rank: scheduler.leave(asked))
        return web.json_response({"success": True, "message": ""})

    async def _bucket(self, request: web.Request) -> web.Response:
        asked = await request.json()
        label = asked["weight_version"]
        self._stumble(f"bucket {self.buckets}", "label" if label else "")
        self.buckets += 1
        await self._all(lambda scheduler, rank: scheduler.take(asked))
        if label:
            self.label, self.buckets = label, 0
            self._stumble("loaded")
        return web.json_response({"success": True, "message": ""})

    async def _update(self, request: web.Request) -> web.Response:
        await self._all(lambda scheduler, rank: scheduler.forget())
        return await super()._update(request)

    async def _checksums(self, request: web.Request) -> web.Response:
        self._stumble("checksums")
        found = await self._all(lambda scheduler, rank: scheduler.checksums(self.loaded, self.info, rank))
        ranks = [{"parallelism_info": {"tp_rank": rank}, "checksums": sums} for rank, sums in enumerate(found)]
        return web.json_response({"success": True, "ranks": ranks})

    async def _info(self, request: web.Request) -> web.Response:
        await self._all(lambda scheduler, rank: None)
        said = json.loads((await super()._info(request)).body)
        return web.json_response(said | {"tp_size": self.info.tensor_parallel})


def play(folder: Path, info: ServerInfo, fault: Fault | None, model_config: str, port: Connection) -> None:
    """The server's process."""
    os.environ[PATIENCE] = str(HANG_S)
    torch.set_num_threads(1)
    strict_nccl.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    async def serve() -> None:
        server = PlayedServer(folder, info, fault, model_config)
        await server.start()
        port.send(server.url)
        # Not its parent process in the system's sense, which is the fork server.
        asyncio.get_running_loop().add_reader(mp.parent_process().sentinel, os._exit, 1)
        await asyncio.sleep(3600)

    asyncio.run(serve())


class PlayedEngine:
    """Engine (rollout.server.engine) around such a process. `fault` befalls the next start's server, once."""

    def __init__(self, folder: Path, model: Path, *, tensor_parallel: int = 1, ours: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ours = folder, ours
        self.info = ServerInfo(device="cpu", dtype="float32", tensor_parallel=tensor_parallel)
        self.fault: Fault | None = None
        self.starts = 0
        self._config = (model / "config.json").read_text()
        self._process: Any = None
        self._url = "http://127.0.0.1:1"

    @property
    def url(self) -> str:
        return self._url

    async def start(self) -> None:
        self.starts += 1
        fork_server.start()
        ours, theirs = fork_server.CONTEXT.Pipe()
        arguments = (self.folder, self.info, self.fault, self._config, theirs)
        self.fault = None
        self._process = fork_server.CONTEXT.Process(target=play, args=arguments, daemon=True)
        self._process.start()
        self._url = await asyncio.to_thread(ours.recv)

    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def log_tail(self) -> str:
        return ""

    async def restart(self, weights: tuple[Path, str] | None = None) -> None:
        if self.ours:
            self.kill()
            await self.start()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(20)
            self._process = None

    async def close(self) -> None:
        self.kill()
