"""The trainer's end of a weight sync without files: sends buckets to all servers and computes the checksums that the
servers must then report. It runs in the first rank of each pipeline stage, which gathers what the stage holds, and
calls the servers itself.

    WeightSender.put(bucket) -> a thread: Transport.send -> SglangClient.update_weights -> server
                                          ChecksumStream (hashed meanwhile) -> Sent.checksums

While that thread sends, loads and hashes one bucket, the ranks gather the next: two are in memory, never more.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.server.server_command import read_key
from rollout.weights.checksums import Checksums, ChecksumStream, ready
from rollout.weights.delta import Base, DeltaTransport
from rollout.weights.transport import Failure, GroupTransport, SendRequest, SharedMemoryTransport
from rollout.wire.client import ServerInfo, SglangClient

Gather = Callable[[Any], Sequence[Any]] | None
"""What each rank beside the same server gives, the one that sends to it first; collective over all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """The result of a send."""

    bytes: int = 0
    size: int = 0
    """Bytes of the weights' values."""
    unchanged: int = 0
    """Bytes of those that were not sent."""
    failures: Mapping[str, Failure] = field(default_factory=dict)
    """By URL, the servers that hold only some of the buckets, or none."""
    checksums: Mapping[ServerInfo, Checksums] = field(default_factory=dict)
    """Of the trainer's weights, as each kind of server should have them."""

    @property
    def changed(self) -> float:
        """Share of the weights' values that were sent."""
        return 1 - self.unchanged / max(1, self.size)

    def then(self, other: "Sent") -> "Sent":
        """Both sends: of the same weights to different servers, or of different weights to the same."""
        counts = {name: getattr(self, name) + getattr(other, name) for name in ("bytes", "size", "unchanged")}
        failures, checksums = {**self.failures, **other.failures}, _merged(self.checksums, other.checksums)
        return Sent(**counts, failures=failures, checksums=checksums)


def _merged(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> dict[Any, Any]:
    """Both, and so their mappings of the same key."""
    both = {key: _merged(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(one[key], Mapping)}
    return {**one, **other, **both}


_TURN_POLL_S = 0.002


class Turns:
    """Of several senders to the same servers one at a time, in the order in which they ask. A server takes one bucket
    after the other, and the broadcasts of two senders, taken in another order by another server, would wait for ever.
    """

    def __init__(self, store: dist.Store) -> None:
        """`store`: the same for all of them."""
        self._store = store

    async def take(self, publish: str, send: Callable[[], Awaitable[dict[str, Failure]]]) -> dict[str, Failure]:
        """What `send` returns. It is not called once one of this publish has failed: then what that one returned."""
        place = self._store.add("asked", 1)
        while self._store.add("ended", 0) < place - 1:
            await asyncio.sleep(_TURN_POLL_S)
        try:
            if self._store.check([publish]):
                return {url: Failure(**failure) for url, failure in json.loads(self._store.get(publish)).items()}
            if failures := await send():
                self._store.set(publish, json.dumps({url: asdict(failure) for url, failure in failures.items()}))
            return failures
        finally:
            self._store.add("ended", 1)


class GroupCache:
    """Keeps process groups from one publish to the next, as long as the servers of each are the same."""

    def __init__(self, turns: Turns | None = None) -> None:
        """`turns`: of all that send parts of the same weights."""
        self.turns = turns
        self._groups: list[GroupTransport] = []
        self._base = Base()

    def get(self, request: SendRequest, device: torch.device) -> GroupTransport:
        """The group of the request's servers. Any other that one of them is in is left here; by `join` at them."""
        places, left = {target.index for target in request.targets}, list[str]()
        for before in [each for each in self._groups if places & {target.index for target in each.targets}]:
            if before.targets == request.targets and not before.broken:
                before.targets, before.more = request.targets, request.more  # the same, but for what they hold
                return before
            self._groups.remove(before)
            before.close()
            if not before.broken:  # of a broken one a server could wait for ever in that call
                left += [*before.left, before.name]
        delta = request.transport == "delta"
        made = DeltaTransport(request, device, self._base) if delta else GroupTransport(request, device)
        made.left = left
        self._groups.append(made)
        return made


class WeightSender(AbstractContextManager["WeightSender"]):
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

    def __exit__(self, *_: object) -> None:
        wait([self._under_way])
        self._run(self._close()).result()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()

    def expect(self, names: Collection[str]) -> None:
        """Before the first bucket: it sends these tensors of the model, and others the rest."""
        self._checksums.limit(names)

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
            work.append(self._in_turn(partial(self._transport.send, source, bucket, self._clients, label)))
        # Both to their ends, whatever becomes of the other: they use the buffer.
        done = await asyncio.gather(*work, asyncio.to_thread(self._hash, tensors), return_exceptions=True)
        if isinstance(self._transport, DeltaTransport):
            self._transport.settle()  # not in this sender's turn, beside those of others
        for error in filter(None, done):
            raise error

    def _hash(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            self._checksums.add(tensors)
            self._checksums.flush()

    def report(self) -> Sent:
        """Once the last bucket was put: waits for it."""
        self._under_way.result()
        # A server that failed in another sender's turn may have been sent nothing here, and no group have begun anew.
        delta = self._transport if self._clients and isinstance(self._transport, DeltaTransport) else None
        saved, unchanged = (0, 0) if delta is None else delta.left_out
        counts = {"bytes": self._bytes - saved, "size": self._bytes, "unchanged": unchanged}
        return Sent(**counts, failures=dict(self._failures), checksums=self._checksums.finish())

    async def _open(self) -> None:
        request, limit_s = self._request, self._request.deadline_s
        key = read_key(request.api_key_file) if request.api_key_file else None
        for url in (target.url for target in request.targets):
            self._clients[url] = SglangClient(url, request_deadline_s=limit_s, control_deadline_s=limit_s, api_key=key)
        if not request.targets or request.transport == "tensor":
            self._transport = SharedMemoryTransport(request, self._device)
        else:
            self._transport = group = self._groups.get(request, self._device)
            await self._in_turn(partial(group.join, self._clients))

    async def _in_turn(self, send: Callable[[], Awaitable[dict[str, Failure]]]) -> None:
        """Leaves the servers that fail out of the buckets that follow."""
        turns = None if isinstance(self._transport, SharedMemoryTransport) else self._groups.turns
        failures = await (send() if turns is None else turns.take(self._request.id, send))
        self._failures |= failures
        for url in failures:
            await self._clients.pop(url).close()

    async def _close(self) -> None:
        for client in self._clients.values():
            await client.close()
        if isinstance(self._transport, SharedMemoryTransport):
            self._transport.close()
