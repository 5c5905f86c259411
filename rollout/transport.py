"""How a bucket of weights gets into servers without a file: shared memory of this machine, or a process group.

Both give it to SGLang as its flattened bucket: uint8 in one piece, and where each tensor lies in it.
"""

import asyncio
import base64
import functools
import os
import pickle
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Protocol
from urllib.parse import urlsplit

import psutil
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, TCPStore, distributed_c10d

from rollout.client import ServerInfo, SglangClient
from rollout.errors import RolloutError, ServerRefused

GRACE_S = 10.0
"""For the servers of a group to notice that it is broken."""

UNANSWERED = "it waits in a broken process group"
LATE = "the bucket did not get there within rollout.sync_deadline_s"

_POLL_S = 0.002
_abandoned: list[object] = []
"""Groups with a broadcast that was given up: to delete one would wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server that gets weights: Target(url="http://127.0.0.1:30000", info=..., starts=0)"""

    url: str
    info: ServerInfo
    starts: int
    """Restarts of the server so far: a server that was restarted has left every process group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """A bucket: its bytes, and the tensors that stand in them one behind the other."""

    buffer: Tensor
    """uint8 [size]"""
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a server did not load a bucket: Failure(reason="...: 400: out of memory", answers=True)"""

    reason: str
    answers: bool
    """Whether it said so itself, and can be asked for something else."""


class Transport(Protocol):
    """One bucket after the other, to servers that are paused."""

    def buffer(self, size: int) -> Tensor:
        """uint8 [size], to be filled with the next bucket."""
        ...

    async def join(self, clients: Mapping[str, SglangClient]) -> dict[str, Failure]:
        """Before the first bucket. {url: why} of the servers that cannot take part."""
        ...

    async def send(self, bucket: Flat, clients: Mapping[str, SglangClient], label: str | None) -> dict[str, Failure]:
        """Returns when every server has loaded the bucket; {url: why} of those that have not.

        `label`: the servers' new name of their weights, with the last bucket.
        """
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class SharedMemoryTransport:
    """A memory of this machine without a name in the file system: it is gone when this process is.

    The servers map it read-only; each rank reads its share. They must run on this machine as the same user. Weights on
    a GPU are gathered there, and hashed there, and copied to the memory bucket by bucket.
    """

    def __init__(self, targets: Sequence[Target], *, device: torch.device, deadline_s: float) -> None:
        """
        Args:
            device: where buckets are filled: that of the trainer's weights.

        Raises:
            RolloutError: a target is on another machine.
        """
        for target in targets:
            check_this_machine(target.url)
        self._ranks = {target.url: target.info.tensor_parallel for target in targets}
        self._device, self._deadline_s = device, deadline_s
        self._file = os.memfd_create("rollout-weights")
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._memory = torch.empty(0, dtype=torch.uint8)

    def buffer(self, size: int) -> Tensor:
        if self._memory.numel() < size:
            os.ftruncate(self._file, size)
            self._memory = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)
        if self._device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._memory[:size]

    async def join(self, clients: Mapping[str, SglangClient]) -> dict[str, Failure]:
        return {}

    async def send(self, bucket: Flat, clients: Mapping[str, SglangClient], label: str | None) -> dict[str, Failure]:
        if bucket.buffer.device.type != "cpu":
            self._memory[: bucket.buffer.numel()].copy_(bucket.buffer)
        payload = _payload(self._path, bucket)
        calls = {
            url: client.update_weights_from_tensor([payload] * self._ranks[url], label, self._deadline_s)
            for url, client in clients.items()
        }
        return await failures_of(calls)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Mapped:
    """Pickles as the call that maps the memory: SGLang's unpickler admits functions of torch."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size

    def __reduce__(self) -> tuple[Callable[..., Tensor], tuple[str, bool, int]]:
        return functools.partial(torch.from_file, dtype=torch.uint8), (self.path, False, self.size)


def _payload(path: str, bucket: Flat) -> str:
    """What SGLang's `update_weights_from_tensor` unpickles, as base64."""
    metadata, start = [], 0
    for name, shape in bucket.shapes.items():
        size = torch.Size(shape).numel() * bucket.dtype.itemsize
        entry = SimpleNamespace(
            name=name, shape=torch.Size(shape), dtype=bucket.dtype, start_idx=start, end_idx=start + size, numel=size
        )
        metadata.append(entry)
        start += size
    content = {"flattened_tensor": _Mapped(path, start), "metadata": metadata}
    return base64.b64encode(pickle.dumps(content)).decode()


def address_towards(targets: Sequence[Target]) -> str:
    """This machine's address for the servers: the loopback one only if all of them are on it."""
    hosts = [urlsplit(target.url).hostname or "" for target in targets]
    found = []
    for host in hosts:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            found.append(str(probe.getsockname()[0]))
    return next((address for address in found if not address.startswith("127.") and address != "::1"), found[0])


def check_this_machine(url: str) -> None:
    """
    Raises:
        RolloutError: the server at `url` is not on this machine.
    """
    host = urlsplit(url).hostname or ""
    here = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    if not {found[4][0] for found in socket.getaddrinfo(host, None)} & here:
        raise RolloutError(
            f"{url}: not on the machine of trainer rank 0, whose memory rollout.weight_sync = tensor shares with the "
            "servers; use distributed or disk"
        )


class GroupTransport:
    """A process group of this process, as rank 0, and all ranks of the servers; one broadcast a bucket.

    It stays from publish to publish. After a failure it is of no use: make a new one.
    """

    def __init__(self, targets: Sequence[Target], *, backend: str, device: torch.device, deadline_s: float) -> None:
        """
        Args:
            backend: "nccl", or "gloo".
            device: where buckets are filled: that of the trainer's weights.
        """
        self.targets = tuple(targets)
        self.broken = False
        self._name = f"weights-{uuid.uuid4().hex[:12]}"
        self._backend, self._device, self._deadline_s = backend, device, deadline_s
        self._host = host = address_towards(targets)
        self._world = 1 + sum(target.info.tensor_parallel for target in targets)
        timeout = timedelta(seconds=deadline_s)
        # Torch by itself would listen on every interface.
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._store = TCPStore(
            host,
            listener.getsockname()[1],
            self._world,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._group: ProcessGroup | None = None
        self._threads = ThreadPoolExecutor(1)

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    async def join(self, clients: Mapping[str, SglangClient]) -> dict[str, Failure]:
        if self._group is not None:
            return {}
        calls, offset = {}, 1
        for target in self.targets:
            calls[target.url] = clients[target.url].init_weights_update_group(
                host=self._host,
                port=self._store.port,
                rank_offset=offset,
                world_size=self._world,
                group_name=self._name,
                backend=self._backend,
                deadline_s=self._deadline_s,
            )
            offset += target.info.tensor_parallel
        made = self._threads.submit(self._make)
        failures = await self._together(calls, made.done)
        if not failures and (error := made.exception()) is not None:
            return self._all_failed(error)
        if not failures:
            self._group = made.result()
        return failures

    async def send(self, bucket: Flat, clients: Mapping[str, SglangClient], label: str | None) -> dict[str, Failure]:
        names = list(bucket.shapes)
        calls = {
            url: client.update_weights_from_distributed(
                names=names,
                dtypes=[bucket.dtype_name] * len(names),
                shapes=[list(shape) for shape in bucket.shapes.values()],
                group_name=self._name,
                label=label,
                deadline_s=self._deadline_s,
            )
            for url, client in clients.items()
        }
        assert self._group is not None
        sent = self._group.broadcast(bucket.buffer, 0)
        failures = await self._together(calls, sent.is_completed)
        if failures:
            _abandoned.extend((self._group, sent, bucket.buffer))
            return failures
        try:
            sent.wait()
        except RuntimeError as error:
            return self._all_failed(error)
        return {}

    def _all_failed(self, error: BaseException) -> dict[str, Failure]:
        """Our own end of the group failed, though every server answered well: none of them can be trusted."""
        self.broken = True
        return {
            target.url: Failure(reason=f"{target.url}: the trainer's end: {error}", answers=True)
            for target in self.targets
        }

    @property
    def name(self) -> str:
        """The servers' name of the group."""
        return self._name

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        if self._group is not None and not self.broken:
            torch.distributed.destroy_process_group(self._group)
        self._group = None

    def _make(self) -> ProcessGroup:
        """This process's end; SGLang's server makes its own the same way, prefix by prefix."""
        store = PrefixStore(self._name, self._store)
        group, _ = distributed_c10d._new_process_group_helper(
            self._world,
            0,
            [],
            distributed_c10d.Backend(self._backend),
            store,
            group_name=self._name,  # type: ignore[arg-type]
            backend_options=None,
            timeout=timedelta(seconds=self._deadline_s),
        )
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self._world)}
        return group

    async def _together(self, calls: "Mapping[str, Any]", ours: Callable[[], bool]) -> dict[str, Failure]:
        """The servers' answers, and our own part. The first failure ends the wait for both: the others would wait for
        the one that is missing."""
        tasks = {url: asyncio.ensure_future(call) for url, call in calls.items()}
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        while True:
            failed = [task for task in tasks.values() if task.done() and task.exception() is not None]
            late = asyncio.get_running_loop().time() > deadline
            if failed or late or (ours() and all(task.done() for task in tasks.values())):
                break
            await asyncio.sleep(_POLL_S)
        if not failed and not late:
            return {}
        self.broken = True
        if self._group is not None and self._backend == "nccl":
            self._group.abort()
        # The others learn of it by a broken connection, or not at all.
        await asyncio.wait(tasks.values(), timeout=GRACE_S)
        reasons = {}
        for url, task in tasks.items():
            if not task.done():
                task.cancel()
                reasons[url] = Failure(reason=f"{url}: {LATE if late else UNANSWERED}", answers=False)
            elif (error := task.exception()) is not None:
                reasons[url] = _failure(error)
            else:
                reasons[url] = Failure(reason=f"{url}: another server failed, and the group with it", answers=True)
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return reasons


async def failures_of(calls: "Mapping[str, Any]") -> dict[str, Failure]:
    """Awaits all calls; {url: error} of those that failed."""
    results = await asyncio.gather(*calls.values(), return_exceptions=True)
    problems = {}
    for url, result in zip(calls, results, strict=True):
        if isinstance(result, BaseException):
            problems[url] = _failure(result)
    return problems


def _failure(error: BaseException) -> Failure:
    """
    Raises:
        BaseException: `error`, if it is not one of the fleet's.
    """
    if not isinstance(error, RolloutError):
        raise error
    return Failure(reason=str(error), answers=isinstance(error, ServerRefused))
