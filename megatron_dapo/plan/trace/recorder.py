"""Process groups that note every call and send nothing, in the place of torch's NCCL and gloo groups."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron_dapo.plan.trace.findings import Call
from megatron_dapo.plan.trace.meter import Meter, place


class Recorder:
    """The calls of this process; `pipeline_shape` is what a pipeline neighbour's shape message says."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.calls: list[Call] = []
        self.pipeline_shape: list[int] = []

    def note(self, group: "RecordingGroup", op: str, tensors: Iterable[Any], peer: int | None = None) -> "_Done":
        """Note a call over `group`; `peer`: global rank of a send's or receive's other side."""
        flat = [tensor for one in tensors for tensor in (one if isinstance(one, list | tuple) else [one])]
        ranks = dist.get_process_group_ranks(group)
        self.calls.append(
            Call(
                group=f"{group.backend} {group.label}",
                ranks=tuple(ranks),
                op=op,
                tensors=" ".join(f"{str(tensor.dtype)[6:]}{list(tensor.shape)}" for tensor in flat),
                peer=peer,
                phase=self.meter.phase,
                place=place(),
                on_cpu=group.backend == "nccl" and any(tensor.device.type != "cuda" for tensor in flat),
            )
        )
        if group.backend == "gloo":
            self.meter.wait("a gloo collective")
        return _Done()


_Work: Any = dist._Work
_ProcessGroup: Any = dist.ProcessGroup  # its methods' types differ between torch's versions


class _Done(_Work):
    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: torch.futures.Future[list[Any]] = torch.futures.Future()
        future.set_result([])
        return future


class RecordingGroup(_ProcessGroup):
    """Every member is this process's rank; `recorder` is set before a group is made."""

    class Options:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.is_high_priority_stream = False
            self._timeout = None
            self.config = SimpleNamespace()
            self.group_name = ""

    backend: ClassVar[str] = "nccl"
    recorder: ClassVar[Recorder]
    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None, **rest: Any) -> None:
        super().__init__(rank, size)
        self.options = self.Options()
        self.number = self.label = ""

    def _get_backend(self, device: Any) -> "RecordingGroup":
        return self

    def _set_group_name(self, name: str) -> None:
        self.number = name

    def _set_group_desc(self, description: str) -> None:
        self.label = description

    @property
    def group_name(self) -> str:
        return self.number

    @property
    def group_desc(self) -> str:
        return self.label

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return self.backend

    name = getBackendName

    def _has_hooks(self) -> bool:
        return False

    def _nothing(self, *args: Any) -> None: ...

    shutdown = eager_connect_single_device = _set_default_backend = _set_sequence_number_for_group = _nothing
    _start_coalescing = _nothing

    def _end_coalescing(self, *args: Any) -> _Done:
        return _Done()

    def barrier(self, *args: Any) -> _Done:
        self.recorder.meter.wait("a barrier")
        return self.recorder.note(self, "barrier", [])

    def send(self, tensors: Any, peer: int, tag: int = 0) -> _Done:
        return self.recorder.note(self, "send", [tensors], dist.get_process_group_ranks(self)[peer])

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> _Done:
        return self.recorder.note(self, "receive", [tensors], dist.get_process_group_ranks(self)[peer])


_FIRST, _SECOND, _BOTH = slice(0, 1), slice(1, 2), slice(0, 2)

_COLLECTIVES = {
    "broadcast": ("broadcast from {root}", _FIRST),
    "allreduce": ("all_reduce {reduction}", _FIRST),
    "allreduce_coalesced": ("all_reduce_coalesced {reduction}", _FIRST),
    "reduce": ("reduce {reduction} to {root}", _FIRST),
    "allgather": ("all_gather", _SECOND),
    "reduce_scatter": ("reduce_scatter {reduction}", _FIRST),
    "gather": ("gather to {root}", _SECOND),
    "scatter": ("scatter from {root}", _FIRST),
    "_allgather_base all_gather_single": ("all_gather_into_tensor", _BOTH),
    "_reduce_scatter_base reduce_scatter_single": ("reduce_scatter_tensor {reduction}", _BOTH),
    "alltoall_base all_to_all_single": ("all_to_all", _BOTH),
    "allgather_into_tensor_coalesced all_gather_single_coalesced": ("all_gather_coalesced", _BOTH),
    "reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced": ("reduce_scatter_coalesced {reduction}", _BOTH),
}
"""Methods of a process group, the second name since torch 2.13: how a call is noted, and which arguments are tensors
whose shapes are."""


def _collective(text: str, tensors: slice) -> Any:
    def call(self: RecordingGroup, *args: Any) -> _Done:
        options = next((one for one in args if hasattr(one, "rootRank") or hasattr(one, "reduceOp")), None)
        op = text.format(root=getattr(options, "rootRank", ""), reduction=_reduction(options))
        return self.recorder.note(self, op, args[tensors])

    return call


for _names, _noted in _COLLECTIVES.items():
    for _name in _names.split():
        setattr(RecordingGroup, _name, _collective(*_noted))


class RecordingGloo(RecordingGroup):
    backend = "gloo"

    def __init__(self, store: Any, rank: int, size: int, timeout: Any = None, **rest: Any) -> None:
        super().__init__(store, rank, size)


def _reduction(options: Any) -> str:
    asked = getattr(options, "reduceOp", None)
    return next((name for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT") if asked == getattr(dist.ReduceOp, name)), "")
