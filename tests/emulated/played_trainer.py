"""Trainer ranks as processes that publish: the project's sender and transport over strict NCCL, without Megatron.

As the actor, all ranks gather each bucket together, over the default group; rank 0 sends it.
"""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from rollout.fleet.weight_update import OnDisk
from rollout.weights import sender as send
from rollout.weights.checksums import ChecksumStream
from rollout.weights.sender import GroupCache, Sent, WeightSender
from rollout.weights.transport import GroupTransport, SendRequest, Target
from rollout.wire.client import ServerInfo
from tests import fork_server
from tests.emulated import strict_nccl
from tests.emulated.strict_board import PATIENCE

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
PATIENCE_S = 60.0
ANSWER_S = 120.0
BUCKETS = 3


@dataclass(frozen=True, kw_only=True)
class Order:
    """What all ranks are asked for."""

    request: SendRequest
    kinds: tuple[ServerInfo, ...]
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Report:
    """Of one rank."""

    sent: Sent | None = None
    seconds: float = 0.0
    largest_gap_s: float = 0.0
    """Longest time for which the event loop of the transport did nothing."""
    error: str = ""
    error_handling: tuple[str | None, ...] = ()
    """What torch's watchdog was told when a group with servers was made, and is told afterwards."""
    faults: tuple[str, ...] = ()
    """NCCL's rules that this rank broke so far, and its waits without an end."""


class _Watched(GroupTransport):
    """Measures how long the event loop stands still while the group is used."""

    largest_gap_s = 0.0
    error_handling: tuple[str | None, ...] = ()

    def _make(self) -> None:
        made = distributed_c10d.ProcessGroupNCCL

        def seen(*arguments: Any) -> Any:
            _Watched.error_handling = (os.environ.get(ERROR_HANDLING),)
            return made(*arguments)

        seen.Options = made.Options  # type: ignore[attr-defined]
        distributed_c10d.ProcessGroupNCCL = seen
        try:
            super()._make()
        finally:
            distributed_c10d.ProcessGroupNCCL = made

    async def _together(self, *arguments: Any, **named: Any) -> Any:
        beat = asyncio.ensure_future(self._beat())
        await asyncio.sleep(0)
        try:
            return await super()._together(*arguments, **named)
        finally:
            await asyncio.sleep(0.02)
            beat.cancel()

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            _Watched.largest_gap_s = max(_Watched.largest_gap_s, now - last)
            last = now


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank, self.groups = rank, GroupCache()

    def publish(self, order: Order) -> Report:
        began = time.monotonic()
        _Watched.largest_gap_s = 0.0
        tensors = load_file(order.folder / "model.safetensors")
        names = list(tensors)
        cuts = [names[at::BUCKETS] for at in range(BUCKETS)]
        config = json.loads((order.folder / "config.json").read_text())
        if self.rank != 0:
            for _ in cuts:
                self._gather()
            return Report(faults=tuple(strict_nccl.faults))
        checksums = ChecksumStream(config, names, order.kinds)
        with (
            checksums,
            WeightSender(order.request, checksums, self.groups, torch.device("cpu"), None) as sender,
        ):
            for cut in cuts:
                self._gather()
                self._put(sender, {name: tensors[name] for name in cut})
            sent = sender.report()
        return Report(
            sent=sent,
            seconds=time.monotonic() - began,
            largest_gap_s=_Watched.largest_gap_s,
            error_handling=(*_Watched.error_handling, os.environ.get(ERROR_HANDLING)),
            faults=tuple(strict_nccl.faults),
        )

    def update(self) -> Report:
        """The trainer's turn."""
        self._gather()
        return Report(faults=tuple(strict_nccl.faults))

    def _gather(self) -> None:
        part = torch.ones(4)
        dist.all_reduce(part)
        assert part[0] == dist.get_world_size()

    def _put(self, sender: WeightSender, tensors: dict[str, torch.Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        memory = sender.buffer(size)
        memory.copy_(torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()]))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        sender.put(SimpleNamespace(size=size, shapes=shapes, dtype_of=lambda _: torch.float32), tensors)


def _abort(group: strict_nccl.StrictGroup) -> None:
    """Torch's does not reach a communicator that is being made: ProcessGroupNCCL knows it only afterwards."""
    if group.communicators:
        group.aborted.set()


def train(rank: int, world: int, rendezvous: str, pipe: Connection, patience_s: float) -> None:
    """A rank's process. The default group is bound to no device, as `process_groups.initialise` makes it."""
    os.environ[PATIENCE] = str(patience_s)
    torch.set_num_threads(1)
    strict_nccl.install()
    strict_nccl.StrictGroup.abort = _abort  # type: ignore[method-assign]
    send.GroupTransport = _Watched  # type: ignore[misc]
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world)
    me = _Rank(rank)
    with suppress(EOFError):
        while True:
            order = pipe.recv()
            try:
                pipe.send(me.publish(order) if order is not None else me.update())
            except BaseException as error:
                pipe.send(Report(error="; ".join([f"rank {rank}: {error!r}", *strict_nccl.faults])))
    os._exit(0)  # as Ray ends a rank: whatever still waits in a thread goes with it


class PlayedTrainer:
    """All ranks, as a `rollout.fleet.weight_update.WeightStream` of the weights in `folder`."""

    def __init__(
        self, root: Path, ranks: int, *, backend: str = "nccl", deadline_s: float = 60.0, patience_s: float = PATIENCE_S
    ) -> None:
        self.folder = root
        self.backend, self.deadline_s = backend, deadline_s
        self.report = Report()
        self._pipes, self._processes = [], []
        rendezvous = f"file://{root}/rendezvous-{time.monotonic_ns()}"
        for rank in range(ranks):
            ours, theirs = fork_server.CONTEXT.Pipe()
            arguments = (rank, ranks, rendezvous, theirs, patience_s)
            process = fork_server.CONTEXT.Process(target=train, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        request = SendRequest(
            transport="distributed",
            targets=tuple(targets),
            label=label,
            deadline_s=self.deadline_s,
            backend=self.backend,  # type: ignore[arg-type]
            api_key_file=None,
            more=more,
        )
        kinds = tuple(dict.fromkeys(target.info for target in targets))
        order = Order(request=request, kinds=kinds, folder=self.folder)
        await self._ask(order)
        assert self.report.sent is not None
        return self.report.sent

    async def update(self) -> None:
        """Work of all ranks without the servers."""
        await self._ask(None)

    async def _ask(self, order: Order | None) -> None:
        for pipe in self._pipes:
            pipe.send(order)
        reports = await asyncio.to_thread(self._answers)
        assert not any(report.error for report in reports), [report.error for report in reports]
        self.report = reports[0]

    def _answers(self) -> list[Report]:
        end = time.monotonic() + ANSWER_S
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(max(0.0, end - time.monotonic())), f"trainer rank {rank} hangs in a publish"
        return [pipe.recv() for pipe in self._pipes]

    @property
    def changed(self) -> bool:
        return False

    async def to_disk(self) -> OnDisk | None:
        return OnDisk(folder=self.folder)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(20)
