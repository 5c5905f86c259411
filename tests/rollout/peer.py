"""A stand-in for a server's end of a weight sync, as a process of its own (`play`): it keeps what it is sent."""

import asyncio
import base64
import io
import json
import os
import pickle
import random
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import save_file
from torch.distributed import distributed_c10d

from rollout.weights import LOADER

ADMITTED = ("builtins", "types", "functools", "torch", "collections", "copyreg")
"""Modules that SGLang's unpickler admits, as far as they are needed."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] not in ADMITTED or name in ("eval", "exec", "compile", "FunctionType"):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class Peer:
    latest_s = 0.02
    """At most so much later than it comes, a call is taken."""

    def __init__(self, folder: Path, fault: str = "", at: int = 0) -> None:
        self.folder, self.fault, self.at = folder, fault, at
        self.bucket = 0
        self.held: dict[str, torch.Tensor] = {}
        self.whole: dict[str, torch.Tensor] = {}
        """Of the last label. Each sender gives it, with its last bucket."""
        self.times: dict[str, int] = {}
        """How often each came."""
        self.groups: dict[str, Any] = {}
        self.sources: set[str] = set()
        """Processes whose memory it has mapped, one for each payload."""
        self.one_at_a_time = asyncio.Lock()

    @web.middleware
    async def in_turn(self, request: web.Request, handler: Any) -> Any:
        """As SGLang's scheduler, in the order in which requests come, which no other server need share."""
        await asyncio.sleep(random.uniform(0, self.latest_s))
        async with self.one_at_a_time:
            return await handler(request)

    async def init_group(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await self._stumble(-1)
        await asyncio.to_thread(self._join, asked)
        return web.json_response({"success": True, "message": ""})

    def _join(self, asked: dict[str, Any]) -> None:
        """As SGLang's `init_custom_process_group`."""
        rank, world, name = asked["rank_offset"], asked["world_size"], asked["group_name"]
        url = f"tcp://{asked['master_address']}:{asked['master_port']}"
        store, _, _ = next(dist.rendezvous(url, rank, world, timeout=timedelta(seconds=60)))
        group, _ = distributed_c10d._new_process_group_helper(
            world,
            rank,
            [],
            distributed_c10d.Backend(asked["backend"]),
            dist.PrefixStore(name, store),
            group_name=name,
            backend_options=None,
            timeout=timedelta(minutes=30),
        )
        self.groups[name] = group

    async def destroy_group(self, request: web.Request) -> web.Response:
        name = (await request.json())["group_name"]
        known = self.groups.pop(name, None) is not None
        if self.fault == "meet":
            (self.folder / name).touch()
            peers = [folder for folder in self.folder.parent.glob("peer*") if folder.is_dir()]
            while known and not all((folder / name).exists() for folder in peers):
                await asyncio.sleep(0.01)
        return web.json_response({"success": known, "message": ""}, status=200 if known else 400)

    async def from_distributed(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await self._stumble(self.bucket)
        self.bucket += 1
        kinds = [getattr(torch, name) for name in asked["dtypes"]]
        counts = [torch.Size(shape).numel() for shape in asked["shapes"]]
        sizes = [count * kind.itemsize for count, kind in zip(counts, kinds, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        try:
            await asyncio.to_thread(lambda: self.groups[asked["group_name"]].broadcast(flat, 0).wait())
        except RuntimeError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        parts = zip(flat.split(sizes), kinds, asked["shapes"], strict=True)
        shaped = [part.view(kind).view(shape).clone() for part, kind, shape in parts]
        return self._take(dict(zip(asked["names"], shaped, strict=True)), asked)

    async def from_tensor(self, request: web.Request) -> web.Response:
        asked = await request.json()
        await self._stumble(self.bucket)
        self.bucket += 1
        if asked["load_format"] == LOADER:
            return await self._changes(asked)
        payloads = [base64.b64decode(payload) for payload in asked["serialized_named_tensors"]]
        self.sources |= {re.findall(rb"/proc/(\d+)/fd", payload)[0].decode() for payload in payloads}
        contents = [_Unpickler(io.BytesIO(payload)).load() for payload in payloads]
        content, flat = contents[0], contents[0]["flattened_tensor"]
        assert all(torch.equal(flat, each["flattened_tensor"]) for each in contents[1:])
        tensors = {
            entry.name: flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape).clone()
            for entry in content["metadata"]
        }
        return self._take(tensors, asked)

    async def _changes(self, asked: dict[str, Any]) -> web.Response:
        """As `rollout.weights.changes.load`."""
        [payload] = map(base64.b64decode, asked["serialized_named_tensors"])
        [(text, empty)] = _Unpickler(io.BytesIO(payload)).load()
        told = json.loads(text)
        assert empty.numel() == 0
        data = torch.empty(told["bytes"], dtype=torch.uint8)
        await asyncio.to_thread(lambda: self.groups[told["group"]].broadcast(data, 0).wait())
        return self._take(self.put_in_place(told, data), asked)

    def put_in_place(self, told: dict[str, Any], data: torch.Tensor) -> dict[str, torch.Tensor]:
        """One value at a time."""
        kind, count = getattr(torch, told["dtype"]), sum(told["counts"])
        values, bits = iter(data[: count * kind.itemsize].view(kind)), data[count * kind.itemsize :].tolist()
        tensors, at = dict[str, torch.Tensor](), 0
        for name, shape in told["tensors"]:
            tensors[name] = flat = self.whole[name].flatten()
            assert self.whole[name].shape == torch.Size(shape)
            for place in range(flat.numel()):
                if bits[(at + place) // 8] >> (at + place) % 8 & 1:
                    flat[place] = next(values)
            tensors[name], at = flat.view(shape), at + flat.numel()
        assert next(values, None) is None
        return tensors

    def _take(self, tensors: dict[str, torch.Tensor], asked: dict[str, Any]) -> web.Response:
        assert asked["load_format"] in ("flattened_bucket", LOADER)
        assert asked["flush_cache"] is False
        self.held |= tensors
        for name in tensors:
            self.times[name] = self.times.get(name, 0) + 1
        if asked["weight_version"] is not None:
            self.whole |= self.held
            told = {"label": asked["weight_version"], "sources": " ".join(sorted(self.sources))}
            save_file(self.whole, self.folder / "held.safetensors", told | {"times": json.dumps(self.times)})
            self.held, self.bucket = {}, 0
        return web.json_response({"success": True, "message": ""})

    async def _stumble(self, bucket: int) -> None:
        if bucket != self.at or self.fault in ("", "meet"):
            return
        if self.fault == "exit":
            os._exit(9)
        if self.fault == "hang":
            await asyncio.sleep(600)
        raise web.HTTPBadRequest(text='{"success": false, "message": "planted"}', content_type="application/json")


async def serve(peer: Peer) -> None:
    app = web.Application(middlewares=[peer.in_turn])
    app.add_routes(
        [
            web.post("/init_weights_update_group", peer.init_group),
            web.post("/destroy_weights_update_group", peer.destroy_group),
            web.post("/update_weights_from_distributed", peer.from_distributed),
            web.post("/update_weights_from_tensor", peer.from_tensor),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (peer.folder / "port.new").write_text(str(runner.addresses[0][1]))
    (peer.folder / "port.new").rename(peer.folder / "port")
    await asyncio.sleep(600)


def play(folder: Path, fault: str = "", at: int = 0) -> None:
    """Of a forked process, until it is killed. Writes its port to `folder`/port, and to `folder`/held.safetensors what
    it holds whenever weights get their label.

    Args:
        fault: exit, hang or refuse at bucket `at` (0 is the first one); the joining of a group is bucket -1. `meet`:
            as over NCCL on one machine, the end of a group waits until all peers end it.
    """
    with (folder / "log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    asyncio.run(serve(Peer(folder, fault, at)))
