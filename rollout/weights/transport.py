"""How a bucket of weights gets into paused servers without a file: by a process group, or by memory that those
beside the trainer's ranks map.

All use SGLang's flattened bucket: all bytes in one piece, and where each tensor lies in it.
"""

import asyncio
import base64
import functools
import os
import pickle
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, distributed_c10d
from torch.multiprocessing import reductions

from rollout.errors import RolloutError, ServerRefused
from rollout.wire.client import ServerInfo, SglangClient

GRACE_S = 3.0
"""Seconds for the servers of a group to notice that it is broken."""

_NEVER = timedelta(days=7)
"""Limit of torch's own watchdog, which would end the process. The transport has deadlines of its own."""

Clients = Mapping[str, SglangClient]
"""By URL."""

Handle = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""What another process calls, and with what, to have a bucket's memory as a tensor."""

_DEVICE = 6
"""Place of the GPU's number in a handle. Another process may count otherwise; SGLang's end takes the UUID too."""

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Variable that a group reads when it is made. By default torch ends the process when a rank of the group is lost, and
a lost server must not end the trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server that gets weights: Target(url="http://127.0.0.1:30000", info=..., restarts=0)"""

    url: str
    info: ServerInfo
    restarts: int
    """Restarts of the server so far. A server that was restarted is in no process group any more."""
    index: int = 0
    """Its place in the fleet."""
    holds: str | None = field(default=None, compare=False)
    """Its name of the weights that it holds, verified."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendRequest:
    """What is to be sent where."""

    transport: Literal["tensor", "distributed", "delta"]
    """`tensor`: the ranks of the servers, in the fleet's order, use the devices of trainer ranks 0, 1, ..., and each
    gets its weights from the rank beside it."""
    targets: tuple[Target, ...]
    """Paused servers; none: only checksums are computed."""
    label: str
    """The servers' new name of their weights."""
    deadline_s: float
    """For each bucket, and for the servers to meet in a process group."""
    backend: Literal["nccl", "gloo"]
    """Of a process group."""
    api_key_file: Path | None
    more: bool = False
    """Whether other servers are sent the same weights next."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """No other request's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a server did not load a bucket: Failure(reason="...: 400: out of memory", answers=True)"""

    reason: str
    answers: bool
    """Whether the server said so itself, and still answers other requests."""


class SharedMemoryTransport:
    """Memory that the ranks of one server map read-only: a GPU's, which both use, or this machine's, without a name in
    the file system, so that it is freed when this process ends. There buckets are filled in two pieces in turn.
    """

    def __init__(self, request: SendRequest, device: torch.device) -> None:
        """`device`: where buckets are filled: that of the trainer's weights."""
        self._device, self._deadline_s = device, request.deadline_s
        self._pieces, self._turn = (_SharedMemory(), _SharedMemory()), 0

    def buffer(self, size: int) -> Tensor:
        """uint8 [size], to be filled with the next bucket, while the one before is sent."""
        if self._device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        self._turn = 1 - self._turn
        return self._pieces[self._turn].sized(size)

    def handle(self, buffer: Tensor) -> Handle:
        """To a filled buffer, for one process; one on a GPU (CUDA IPC) is kept by torch until that lets it go."""
        if buffer.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(buffer)
            gpu = str(torch.cuda.get_device_properties(buffer.device).uuid)
            return rebuild, (*arguments[:_DEVICE], gpu, *arguments[_DEVICE + 1 :])
        path = next(each.path for each in self._pieces if each.memory.data_ptr() == buffer.data_ptr())
        return functools.partial(torch.from_file, dtype=torch.uint8), (path, False, buffer.numel())

    async def send(
        self, source: Sequence[Handle], bucket: Any, clients: Clients, label: str | None
    ) -> dict[str, Failure]:
        """Returns when the server has loaded the bucket; {url: why} if it has not.

        Args:
            source: for each of the server's ranks, a handle to uint8 [size], in which the tensors lie one behind the
                other.
            bucket: has their `shapes` and `dtype_of` (megatron_dapo.actor.weights.buckets.Bucket).
            label: the servers' new name of their weights, sent with the last bucket.
        """
        payloads = [_payload(handle, bucket) for handle in source]
        body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "disable_draft_model": True}
        calls = {url: client.update_weights("tensor", body, label, self._deadline_s) for url, client in clients.items()}
        return await failures_of(calls)

    def close(self) -> None:
        """Frees the memory."""
        for piece in self._pieces:
            os.close(piece.file)


class _SharedMemory:
    """A file without a name, as large as the largest that was asked for, and where it is mapped."""

    def __init__(self) -> None:
        self.file = os.memfd_create("rollout-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        self.memory = torch.empty(0, dtype=torch.uint8)

    def sized(self, size: int) -> Tensor:
        if self.memory.numel() < size:
            os.ftruncate(self.file, size)
            self.memory = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        return self.memory[:size]


class _Mapped:
    """Pickles as the call that maps the memory; SGLang's unpickler admits functions of torch."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __reduce__(self) -> Handle:
        return self._handle


def _payload(handle: Handle, bucket: Any) -> str:
    """What SGLang's `update_weights_from_tensor` unpickles, as base64."""
    metadata, end = [], 0
    for name, shape in ((name, torch.Size(shape)) for name, shape in bucket.shapes.items()):
        dtype = bucket.dtype_of(name)
        start, end = end, end + shape.numel() * dtype.itemsize
        place = {"start_idx": start, "end_idx": end, "numel": end - start}
        metadata.append(SimpleNamespace(name=name, shape=shape, dtype=dtype, **place))
    return base64.b64encode(pickle.dumps({"flattened_tensor": _Mapped(handle), "metadata": metadata})).decode()


def own_address_for(targets: Sequence[Target]) -> str:
    """This machine's address as the servers see it; the loopback address only if all of them are on this machine."""
    own = []
    for target in targets:
        family, _, _, _, where = socket.getaddrinfo(urlsplit(target.url).hostname, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            own.append(str(probe.getsockname()[0]))
    return next((address for address in own if not ip_address(address).is_loopback), own[0])


class GroupTransport:
    """A process group of this process, as rank 0, and all ranks of the servers; one broadcast per bucket.

    It is kept from publish to publish. After a failure it cannot be used any more: make a new one. This process's part
    of each call runs in a thread of its own: NCCL creates its communicator in the first broadcast, and the thread waits
    there until every rank has come. Torch's `abort` does not reach a communicator that is being created, so such a
    thread may never end.
    """

    def __init__(self, request: SendRequest, device: torch.device) -> None:
        """`device`: where buckets are filled: that of the trainer's weights."""
        self.targets, self.more = request.targets, request.more
        self.broken = False
        self.name = f"weights-{uuid.uuid4().hex[:12]}"
        """The servers' name of the group."""
        self.left: list[str] = []
        """Groups that this one replaces: `join` ends them at the servers."""
        self._backend, self._device, self._deadline_s = request.backend, device, request.deadline_s
        self._host = host = own_address_for(self.targets)
        self._world = 1 + sum(target.info.tensor_parallel for target in self.targets)
        # Torch by itself would listen on every interface.
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port, limit = listener.getsockname()[1], timedelta(seconds=self._deadline_s)
        options: dict[str, Any] = {"is_master": True, "timeout": limit, "wait_for_workers": False}
        self._store = TCPStore(host, port, self._world, **options, master_listen_fd=listener.detach())
        self._group: Any = None
        # Later than the servers' deadline, so that the late server is named and not this process.
        self._own_limit = timedelta(seconds=self._deadline_s + 2 * GRACE_S)

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    async def join(self, clients: Clients) -> dict[str, Failure]:
        """Before the first bucket. {url: why} of the servers that cannot take part."""
        if self._group is not None:
            return {}
        # In this sender's turn: over NCCL the end of one waits for the group's other ranks on the same machine.
        while self.left:
            name = self.left.pop()
            await failures_of({url: client.destroy_weights_update_group(name) for url, client in clients.items()})
        group = {"master_address": self._host, "master_port": self._store.port, "world_size": self._world}
        group |= {"group_name": self.name, "backend": self._backend}
        calls, offset = {}, 1
        for target in self.targets:
            body = group | {"rank_offset": offset}
            calls[target.url] = clients[target.url].init_weights_update_group(body, self._deadline_s)
            offset += target.info.tensor_parallel
        # Over NCCL a server's end is made without the others: it waits for nobody yet.
        return await self._together("the joining of the process group", calls, self._make, may_hang=False)

    async def send(self, buffer: Tensor, bucket: Any, clients: Clients, label: str | None) -> dict[str, Failure]:
        """As `SharedMemoryTransport.send`."""
        names, shapes = list(bucket.shapes), [list(shape) for shape in bucket.shapes.values()]
        dtypes = [str(bucket.dtype_of(name)).removeprefix("torch.") for name in names]
        body: dict[str, Any] = {"names": names, "dtypes": dtypes, "shapes": shapes}
        body |= {"group_name": self.name, "load_format": "flattened_bucket"}
        calls = {url: one.update_weights("distributed", body, label, self._deadline_s) for url, one in clients.items()}
        return await self._beside(calls, buffer, names[0])

    async def _beside(self, calls: "Mapping[str, Any]", data: Tensor, name: str) -> dict[str, Failure]:
        """Broadcasts `data`, beside the calls in which the servers receive it; `name`: of its first tensor."""
        # What fills the data comes before; what is queued from here on, its hashes, need not wait for the broadcast.
        filled = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
        ours = functools.partial(self._broadcast, data, filled)
        return await self._together(f"the broadcast of {name}", calls, ours, may_hang=self._backend == "nccl")

    def close(self) -> None:
        """Leaves the group, without a wait: over NCCL its end can need the other ranks."""
        group, self._group = self._group, None
        if group is not None:
            _in_thread(group.abort)

    def _make(self) -> None:
        """This process's end of the group. Torch's `new_group` would need a call of every trainer rank, so it is made
        here, on the store alone. The prefixes are those that torch gives to SGLang's end of the group.

        The prefixes, `ProcessGroupNCCL` and its options are internals of torch (2.11 to 2.13). If torch changes them,
        the join fails or ends at its deadline, and the servers read a folder.
        """
        device = "cuda" if self._backend == "nccl" else "cpu"  # the first one that torch registers the backend for
        store = PrefixStore(f"{device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store)))
        if self._backend == "gloo":
            self._group = ProcessGroupGloo(store, 0, self._world, self._own_limit)
            return
        options = distributed_c10d.ProcessGroupNCCL.Options()
        options.group_name = self.name  # type: ignore[assignment]
        options._timeout = _NEVER
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = "0"
        try:
            self._group = distributed_c10d.ProcessGroupNCCL(store, 0, self._world, options)
        finally:
            del os.environ[_ERROR_HANDLING]
            os.environ |= {} if before is None else {_ERROR_HANDLING: before}

    def _broadcast(self, buffer: Tensor, filled: torch.cuda.Event | None) -> None:
        stream = torch.cuda.Stream(buffer.device) if buffer.is_cuda else None
        if stream is not None and filled is not None:
            stream.wait_event(filled)
        with torch.cuda.stream(stream):
            # With a limit NCCL lets the host wait too, until the bucket is sent.
            self._group.broadcast([buffer], BroadcastOptions()).wait(self._own_limit)

    async def _together(
        self, what: str, calls: "Mapping[str, Any]", ours: Callable[[], None], *, may_hang: bool
    ) -> dict[str, Failure]:
        """Runs the servers' calls and this process's part at the same time. The first failure ends the wait for all:
        the others would wait for the missing one.

        Args:
            may_hang: whether the device of a server that takes part may wait for ever, whatever the server answers.
                Over NCCL it answers before the data is there.
        """
        tasks = {url: asyncio.ensure_future(call) for url, call in calls.items()}
        own = asyncio.wrap_future(_in_thread(ours))
        everybody = {own, *tasks.values()}
        await asyncio.wait(everybody, timeout=self._deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        if all(task.done() and task.exception() is None for task in everybody):
            return {}
        self.broken = True
        late = not any(task.done() and task.exception() for task in everybody)
        if not late:  # who broke it is known a little later than that it broke
            await asyncio.wait(tasks.values(), timeout=GRACE_S)
        failed = [url for url, task in tasks.items() if task.done() and task.exception()]
        silent = [url for url, task in tasks.items() if not task.done()]
        if failed:
            cause = f"{what} failed at {', '.join(failed)}"
        elif late:
            cause = f"{what} did not end within rollout.sync_deadline_s = {self._deadline_s:g} s: no answer from "
            state = "has done its part" if own.done() else "waits in it"
            cause += f"{', '.join(silent) or 'nobody'}; the trainer {state}"
        else:
            cause = f"{what} failed at the trainer: {own.exception()}"
        for task in everybody:
            task.cancel()
        results = await asyncio.gather(own, *tasks.values(), return_exceptions=True)
        self.close()
        failures = {}
        for url, error in zip(tasks, results[1:], strict=True):
            failure = _failure(error) if url in failed else Failure(reason=f"{url}: {cause}", answers=url not in silent)
            failures[url] = replace(failure, answers=failure.answers and not may_hang)
        return failures


def _in_thread(work: Callable[[], object]) -> "Future[object]":
    """Runs `work` in a daemon thread: it may wait for ever, and does not keep the process from ending."""
    done: Future[object] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="weight-sync", daemon=True).start()
    return done


async def failures_of(calls: "Mapping[str, Any]") -> dict[str, Failure]:
    """Awaits all calls; {url: error} of those that failed."""
    results = zip(calls, await asyncio.gather(*calls.values(), return_exceptions=True), strict=True)
    return {url: _failure(result) for url, result in results if isinstance(result, BaseException)}


def _failure(error: BaseException) -> Failure:
    """
    Raises:
        BaseException: `error`, if it is not one of the fleet's.
    """
    if not isinstance(error, RolloutError):
        raise error
    return Failure(reason=str(error), answers=isinstance(error, ServerRefused))
