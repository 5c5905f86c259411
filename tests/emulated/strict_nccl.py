"""`backend="nccl"` without a GPU: gloo carries the data, NCCL's rules decide. `install` comes first in a process.

Torch's own code still decides which group is split from which: only the class behind `ProcessGroupNCCL` is replaced.

- The first call of a group makes its communicator, and blocks its thread until every rank of the group has come.
- A group made while the default group is bound to a device is split from it: every rank of the parent has to come.
- The ranks of a group make the same calls in the same order, with equal shapes and types; else `Mismatch` names both.
- A single send or receive makes a communicator of its pair; in a batch it uses the whole group's.
- A call only enqueues. With the emulated device, `wait` orders the device's work and leaves the host alone.
- A suspended communicator takes no call (`strict_library`).
- `abort` ends this rank's part and tells nobody. A rank that dies tells nobody either.

Whatever would wait for ever raises `Hang` after `patience_s()`, with who waits for whom in which call.

Not modelled: NCCL's topology and transports, its protocols' numerics, streams other than one for each communicator.
Python sees one class where torch has a group and its backend, so code that tells them apart sees the group.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from tests.emulated import strict_calls as calls
from tests.emulated import strict_stream
from tests.emulated.strict_board import Aborted, Board, Hang, Mismatch, StrictError, faults, patience_s
from tests.emulated.strict_library import library
from tests.emulated.strict_stream import Communicator, StrictBatch, StrictWork

__all__ = ["Aborted", "Hang", "Mismatch", "StrictError", "faults", "install", "log", "patience_s"]

log: list[tuple[str, str]] = []
"""(communicator, call) of this rank, in order."""


class Options:
    """As much of ProcessGroupNCCL.Options as torch sets."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.split_from: Any = None
        self.split_color = 0
        self._timeout = timedelta(minutes=10)
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class StrictGroup(ProcessGroup):
    """Stands for ProcessGroupNCCL, and for the ProcessGroup around it."""

    Options = Options
    supports_splitting = True
    supports_coalescing = True

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self.store, self.mine, self.count, self.options = store, rank, size, options
        self.label = options.group_name
        self.board = Board(store, rank, self.label)
        self.communicators: dict[str, Communicator] = {}
        self.splits = 0
        self.aborted = threading.Event()
        self.failed: StrictError | None = None
        self.batched = False

    # What torch asks of a backend while it makes and ends a group.
    def _get_backend(self, device: Any) -> "StrictGroup":
        return self

    def _set_sequence_number_for_group(self) -> None: ...

    def _set_default_backend(self, kind: Any) -> None: ...

    def _set_group_desc(self, text: str) -> None: ...

    def _set_group_name(self, name: str) -> None:
        self.label = self.board.label = name

    def _get_backend_name(self) -> str:
        return "nccl"

    def getBackendName(self) -> str:  # noqa: N802
        return "nccl"

    def name(self) -> str:
        return "nccl"

    def _has_hooks(self) -> bool:
        return False

    def _group_start(self) -> None: ...

    def _group_end(self) -> None: ...

    @property
    def group_name(self) -> str:
        return self.label

    def _comm_ptr(self) -> int:
        """As torch's: 0 before the group's first call, and of no pair's."""
        return library.pointer(self) if "all" in self.communicators else 0

    def shutdown(self, *_: Any) -> None:
        """What is enqueued is carried out first, as by ProcessGroupNCCL. What never ends stands in `faults`."""
        for communicator in list(self.communicators.values()):
            communicator.flush()
        self.aborted.set()

    def abort(self, *_: Any) -> None:
        """End this rank's part; nobody is told."""
        self.aborted.set()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.bound_device_id = device
        self._communicator("all", None, f"the eager connection to {device}")

    def perform_nocolor_split(self, device: Any) -> None:
        self._take_part_in_split(None, "no colour: a group without this rank")

    def _take_part_in_split(self, color: int | None, why: str) -> dict[int, str]:
        self.splits += 1
        key, what = f"split/{self.splits}", f"ncclCommSplit #{self.splits} ({why})"
        self.board.post("last", f"came to {what}")
        return self.board.meet(key, range(self.count), what, str(color), self.aborted)

    def _communicator(self, key: str, ranks: list[int] | None, why: str) -> Communicator:
        if key in self.communicators:
            return self.communicators[key]
        parent = self.options.split_from
        if parent is not None and key == "all":
            color = self.options.split_color
            taken = parent._take_part_in_split(color, f"for group {self.label}: {why}")
            members = [rank for rank, text in taken.items() if text == str(color)]
            if len(members) != self.count:
                raise StrictError(
                    f"{self.label}: {why}: its communicator is split from group {parent.label}, whose ranks {members} "
                    f"of {parent.count} take part; the group has {self.count} ranks, and the others are not in it"
                )
        ranks = list(range(self.count)) if ranks is None else ranks
        what = f"the making of communicator '{key}' by its first call, {why}"
        self.board.post("last", f"came to {what}")
        self.board.meet(f"made/{key}", ranks, what, "here", self.aborted)
        self.communicators[key] = Communicator(self, key, ranks)
        return self.communicators[key]

    def _enqueue(
        self,
        what: str,
        run: Callable[[Any, list[torch.Tensor], list[torch.Tensor]], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        key: str = "all",
        ranks: list[int] | None = None,
        same: str | None = None,
    ) -> StrictWork:
        if self.failed is not None:
            raise self.failed
        if self.aborted.is_set():
            raise Aborted(f"{self.label}: rank {self.mine}: {what} after abort")
        where = f"{self.label}: rank {self.mine}: {what}"
        if (key == "all" or self.batched) and library.is_suspended(self):
            raise StrictError(f"{where}: on a suspended communicator")
        communicator = self._communicator(key, ranks, what)
        take = partial(strict_stream.device.data, call=where, communicator=communicator)
        inputs, outputs = [take(tensor, written=False) for tensor in reads], [take(t, written=True) for t in writes]
        log.append((self.label if key == "all" else f"{self.label}:{key}", what))
        done = communicator.submit(what, same or what, lambda gloo: run(gloo, inputs, outputs))
        work = StrictWork(what, done, inputs, outputs, self.aborted, communicator)
        strict_stream.device.enqueued(work)
        return work

    # The calls. Torch passes lists with options; code that calls a group itself may pass a tensor and a rank.
    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> StrictWork:
        tensors, root = _list(tensors), calls.root_of(opts)
        what = f"broadcast from {root} of {calls.shapes(tensors)}"
        sends = self.mine == root
        return self._enqueue(
            what,
            lambda gloo, i, o: gloo.broadcast((i or o)[0], root).wait(),
            reads=tensors if sends else (),
            writes=() if sends else tensors,
        )

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> StrictWork:
        tensors, op = _list(tensors), calls.op_of(opts)

        def run(gloo: Any, i: Any, o: list[torch.Tensor]) -> None:
            for tensor in o:
                calls.all_reduce(gloo, tensor, op)

        return self._enqueue(
            f"all_reduce {calls.op_name(op)} of {calls.shapes(tensors)}", run, reads=(), writes=tensors
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> StrictWork:
        tensors, op, root = _list(tensors), calls.op_of(opts), calls.root_of(opts)

        def run(gloo: Any, i: Any, o: list[torch.Tensor]) -> None:
            whole = o[0].clone()
            calls.all_reduce(gloo, whole, op)
            if self.mine == root:
                o[0].copy_(whole)

        what = f"reduce {calls.op_name(op)} to {root} of {calls.shapes(tensors)}"
        return self._enqueue(what, run, reads=(), writes=tensors)

    def barrier(self, opts: Any = None) -> StrictWork:
        """Blocks the host, as torch's does over NCCL."""
        work = self._enqueue("barrier", lambda gloo, i, o: gloo.barrier().wait(), reads=(), writes=())
        work.finish()
        return work

    def allgather(self, outputs: Any, values: Any, opts: Any = None) -> StrictWork:
        return self._gather_all(outputs[0], values[0], "all_gather")

    def _allgather_base(self, output: Any, value: Any, opts: Any = None) -> StrictWork:
        _check_size(f"{self.label}: all_gather_into_tensor", output, value, self.count)
        return self._gather_all(output.view(-1).chunk(self.count), value, "all_gather_into_tensor")

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, values: Any, opts: Any = None) -> StrictBatch:
        return StrictBatch([self._allgather_base(*pair) for pair in zip(outputs, values, strict=True)])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _gather_all(self, outputs: Sequence[torch.Tensor], value: torch.Tensor, name: str) -> StrictWork:
        return self._enqueue(
            f"{name} of {calls.shapes([value])}",
            lambda gloo, i, o: calls.all_gather(gloo, o, i[0]),
            reads=[value],
            writes=outputs,
        )

    def reduce_scatter(self, outputs: Any, values: Any, opts: Any = None) -> StrictWork:
        return self._scatter_sum(outputs[0], values[0], calls.op_of(opts), "reduce_scatter")

    def _reduce_scatter_base(self, output: Any, value: Any, opts: Any = None) -> StrictWork:
        _check_size(f"{self.label}: reduce_scatter_tensor", value, output, self.count)
        return self._scatter_sum(output, value.view(-1).chunk(self.count), calls.op_of(opts), "reduce_scatter_tensor")

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, values: Any, opts: Any = None) -> StrictBatch:
        return StrictBatch([self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, values, strict=True)])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scatter_sum(self, output: torch.Tensor, values: Sequence[torch.Tensor], op: Any, name: str) -> StrictWork:
        return self._enqueue(
            f"{name} {calls.op_name(op)} of {calls.shapes(values)}",
            lambda gloo, i, o: calls.reduce_scatter(gloo, o[0], i, op),
            reads=list(values),
            writes=[output],
        )

    def alltoall_base(self, output: Any, value: Any, outs: Any, ins: Any, opts: Any = None) -> StrictWork:
        what = f"all_to_all_single of {value.dtype!s}{list(value.shape[1:])}"
        return self._enqueue(
            what,
            lambda gloo, i, o: gloo.alltoall_base(o[0], i[0], outs, ins).wait(),
            reads=[value],
            writes=[output],
        )

    all_to_all_single = alltoall_base

    def gather(self, outputs: Any, values: Any, opts: Any = None) -> StrictWork:
        root = calls.root_of(opts)

        def run(gloo: Any, i: list[torch.Tensor], o: list[torch.Tensor]) -> None:
            calls.all_gather(gloo, o or [torch.empty_like(i[0]) for _ in range(self.count)], i[0])

        what = f"gather to {root} of {calls.shapes(values)}"
        return self._enqueue(what, run, reads=[values[0]], writes=outputs[0] if outputs else ())

    def scatter(self, outputs: Any, values: Any, opts: Any = None) -> StrictWork:
        def run(gloo: Any, i: list[torch.Tensor], o: list[torch.Tensor]) -> None:
            gloo.scatter(o, [i] if i else [], opts).wait()

        what = f"scatter from {calls.root_of(opts)} of {calls.shapes(outputs)}"
        return self._enqueue(what, run, reads=values[0] if values else (), writes=outputs)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> StrictWork:
        return self._point_to_point(_list(tensors), peer, sends=True)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> StrictWork:
        return self._point_to_point(_list(tensors), peer, sends=False)

    def _point_to_point(self, tensors: list[torch.Tensor], peer: int, *, sends: bool) -> StrictWork:
        """In the pair's own communicator, where both directions share one order; in a batch the group's is used, and
        only the calls of one direction are ordered."""
        pair = sorted((self.mine, peer))
        sender = self.mine if sends else peer
        what = f"{'send' if sends else 'recv'} of {calls.shapes(tensors)} {'to' if sends else 'from'} {peer}"
        key = f"{pair[0]}-{pair[1]}"
        if self.batched:
            self._communicator("all", None, f"batched {what}")
            key = f"{sender}>{peer if sends else self.mine} in batches"
            # Not made here: a communicator that exists needs nobody to come.
            if key not in self.communicators:
                self.communicators[key] = Communicator(self, key, pair)
        there = pair.index(peer)

        def run(gloo: Any, i: list[torch.Tensor], o: list[torch.Tensor]) -> None:
            buffer = (i or o)[0]
            flat = buffer.contiguous()
            (gloo.send if sends else gloo.recv)([flat], there, 0).wait()
            if not sends and flat is not buffer:
                buffer.copy_(flat)

        same = f"a transfer of {calls.shapes(tensors)} from {sender}"
        reads, writes = (tensors, ()) if sends else ((), tensors)
        return self._enqueue(what, run, reads=reads, writes=writes, key=key, ranks=pair, same=same)

    def _start_coalescing(self, device: Any = None) -> None:
        self.batched = True

    def _end_coalescing(self, device: Any = None) -> StrictBatch:
        self.batched = False
        return StrictBatch([])


def _list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _check_size(call: str, whole: torch.Tensor, part: torch.Tensor, ranks: int) -> None:
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype or not whole.is_contiguous():
        raise StrictError(f"{call}: {calls.shapes([whole])} is not {ranks} times {calls.shapes([part])}, contiguous")


def install(*, emulated_device: bool = False) -> None:
    """`nccl` is this backend from now on, in this process.

    Without `emulated_device` every tensor counts as the GPU's, and `wait` blocks until the data is there. With it see
    `strict_device`; call it before anything starts threads, and `strict_device.answer_megatron` once
    `megatron_dapo.actor.device` is prepared for the CPU.
    """
    if emulated_device:
        from tests.emulated import strict_device

        strict_stream.device = strict_device.EmulatedDevice()
        strict_device.install(strict_stream.device)
    distributed_c10d.ProcessGroupNCCL = StrictGroup
    distributed_c10d.is_nccl_available = dist.is_nccl_available = lambda: True
    distributed_c10d._NCCL_AVAILABLE = True
    where = "cuda:0" if emulated_device else "cpu"
    distributed_c10d._get_object_coll_device = lambda group=None: where
    distributed_c10d._get_pg_default_device = lambda group=None: torch.device(where)
    one_by_one = distributed_c10d.batch_isend_irecv

    def batch(ops: Any) -> Any:  # torch tells a group that is written in Python nothing of a batch
        group = ops[0].group or dist.group.WORLD
        if not isinstance(group, StrictGroup):
            return one_by_one(ops)
        group._start_coalescing()
        try:
            return one_by_one(ops)
        finally:
            group._end_coalescing()

    distributed_c10d.batch_isend_irecv = dist.batch_isend_irecv = batch
    torch.cuda.nccl.version = lambda *_: (2, 28, 9)  # type: ignore[assignment]
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    torch.accelerator.device_count = lambda: 8
