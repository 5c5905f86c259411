"""The trainer's end of a weight sync without files: sends buckets to all servers and computes the checksums that the
servers must then report. It runs in trainer rank 0, which holds the gathered weights, and calls the servers itself.

    WeightSender.put(bucket) -> a thread: Transport.send -> SglangClient.update_weights -> server
                                          ChecksumStream (hashed meanwhile) -> Sent.checksums

While that thread sends, loads and hashes one bucket, the ranks gather the next: two are in memory, never more.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.server.server_command import read_key
from rollout.weights.checksums import ChecksumStream, ready
from rollout.weights.delta import Base, DeltaTransport
from rollout.weights.transport import (
    Clients,
    Failure,
    GroupTransport,
    SendRequest,
    Sent,
    SharedMemoryTransport,
    failures_of,
)
from rollout.wire.client import SglangClient

Gather = Callable[[Any], Sequence[Any]] | None
"""What each rank beside the same server gives, the one that sends to it first; collective over all ranks."""


class GroupCache:
    """Keeps process groups from one publish to the next, as long as the servers of each are the same."""

    def __init__(self) -> None:
        self._groups: list[GroupTransport] = []
        self._base = Base()

    async def get(self, request: SendRequest, clients: Clients, device: torch.device) -> GroupTransport:
        """The group of the request's servers. Any other that one of them is in is left, and ended at those of
        `clients`."""
        places = {target.index for target in request.targets}
        for before in [each for each in self._groups if places & {target.index for target in each.targets}]:
            if before.targets == request.targets and not before.broken:
                before.targets, before.more = request.targets, request.more  # the same, but for what they hold
                return before
            self._groups.remove(before)
            before.close()
            if not before.broken:  # of a broken one a server could wait for ever in this call
                ends = {url: client.destroy_weights_update_group(before.name) for url, client in clients.items()}
                await failures_of(ends)
        delta = request.transport == "delta"
        made = DeltaTransport(request, device, self._base) if delta else GroupTransport(request, device)
        self._groups.append(made)
        return made


class WeightSender:
    """A sink of buckets (megatron_dapo.actor.weights.hf_weights.stream_weights) that sends each one to every server.

    Use as a context. A server that fails is left out of the buckets that follow; nothing is raised for it.
    """

    def __init__(
        self, request: SendRequest, checksums: ChecksumStream, groups: GroupCache, device: torch.device, gather: Gather
    ) -> None:
        """
        Args:
            device: where the trainer's weights are.
            gather: for `tensor`; then all ranks have a sender, and rank 0 broadcasts each bucket.
        """
        self._gather = gather
        self._request, self._checksums, self._groups, self._device = request, checksums, groups, device
        self._transport: SharedMemoryTransport | GroupTransport | None = None
        self._clients: dict[str, SglangClient] = {}
        self._failures: dict[str, Failure] = {}
        self._runner, self._thread = asyncio.Runner(), ThreadPoolExecutor(1, thread_name_prefix="weight-sender")
        self._under_way: Future[None] = ready(None)
        # On that of the gathering, a bucket would be sent and hashed only between two gathers.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._bytes = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        wait([self._under_way])
        self._run(self._close()).result()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()

    def buffer(self, size: int) -> Tensor:
        """Memory for the next bucket, which the transport can send from; another than that of the bucket under way."""
        if self._transport is None:  # not in the constructor: an error here must not leave the other ranks waiting
            self._run(self._open()).result()
        assert self._transport is not None
        self._buffer = self._transport.buffer(size)
        return self._buffer

    def put(self, bucket: Any, tensors: Mapping[str, Tensor]) -> None:
        """Returns when the bucket before is sent and hashed, and its memory may be used again; this one is then under
        way."""
        self._under_way.result()
        source: Any = self._buffer
        if self._gather is not None and isinstance(self._transport, SharedMemoryTransport):
            dist.broadcast(source, src=0)
            # For a server that is lost no handle is made: it would never let the memory go.
            wanted = self._gather(bool(self._clients))[0]
            source = self._gather(self._transport.handle(source) if wanted else None)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._under_way = self._run(self._pass_on(source, bucket, tensors))

    def _run(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        """In the thread, one after the other."""

        def run() -> None:
            with torch.cuda.stream(self._stream):
                self._runner.run(work)

        return self._thread.submit(run)

    async def _pass_on(self, source: Any, bucket: Any, tensors: Mapping[str, Tensor]) -> None:
        self._bytes += bucket.size
        label = self._request.label if self._checksums.missing <= tensors.keys() else None
        work: list[Coroutine[Any, Any, None]] = []
        if self._clients and self._transport is not None:
            work.append(self._drop_failed(self._transport.send(source, bucket, self._clients, label)))
        # Both to their ends, whatever becomes of the other: they use the buffer.
        done = await asyncio.gather(*work, asyncio.to_thread(self._hash, tensors), return_exceptions=True)
        for error in filter(None, done):
            raise error

    def _hash(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            self._checksums.add(tensors)
            self._checksums.flush()

    def report(self) -> Sent:
        """Once the last bucket was put: waits for it."""
        self._under_way.result()
        sent = Sent(bytes=self._bytes, failures=dict(self._failures), checksums=self._checksums.finish())
        return self._transport.left_out(sent) if isinstance(self._transport, DeltaTransport) else sent

    async def _open(self) -> None:
        request, limit_s = self._request, self._request.deadline_s
        key = read_key(request.api_key_file) if request.api_key_file else None
        for url in (target.url for target in request.targets):
            self._clients[url] = SglangClient(url, request_deadline_s=limit_s, control_deadline_s=limit_s, api_key=key)
        if not request.targets or request.transport == "tensor":
            self._transport = SharedMemoryTransport(request, self._device)
        else:
            self._transport = group = await self._groups.get(request, self._clients, self._device)
            await self._drop_failed(group.join(self._clients))

    async def _drop_failed(self, work: Coroutine[Any, Any, dict[str, Failure]]) -> None:
        """Leaves the servers that fail in `work` out of the buckets that follow."""
        failures = await work
        self._failures |= failures
        for url in failures:
            await self._clients.pop(url).close()

    async def _close(self) -> None:
        for client in self._clients.values():
            await client.close()
        if isinstance(self._transport, SharedMemoryTransport):
            self._transport.close()
