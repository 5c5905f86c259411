"""Process groups that note every call and send nothing, in the place of torch's NCCL and gloo groups."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from tests.symbolic.findings import Call
from tests.symbolic.meter import Meter, place

_COLLECTIVES = """
    broadcast allreduce allreduce_coalesced reduce allgather reduce_scatter gather scatter alltoall alltoall_base
    _allgather_base _reduce_scatter_base allgather_into_tensor_coalesced reduce_scatter_tensor_coalesced
    all_gather_single reduce_scatter_single all_to_all_single all_gather_single_coalesced
    reduce_scatter_single_coalesced
"""
"""Methods of a process group; those of the last two lines since torch 2.13."""

_Work: Any = dist._Work
_ProcessGroup: Any = dist.ProcessGroup  # its methods' types differ between torch's versions


class _Done(_Work):
    def wait(self, *args: Any) -> bool:
        return True


class RecordingGroup(_ProcessGroup):
    """Every member is this process's rank; `meter` is set before a group is made."""

    Options = SimpleNamespace
    backend: ClassVar[str] = "nccl"
    meter: ClassVar[Meter]
    calls: ClassVar[list[Call]] = []
    """Of all groups, in order."""

    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int, *args: Any, **options: Any) -> None:
        super().__init__(rank, size)

    def _get_backend(self, device: Any) -> "RecordingGroup":
        return self

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return self.backend

    name = getBackendName

    def _done(self, *args: Any) -> _Done:
        return _Done()

    _set_default_backend = _set_sequence_number_for_group = _start_coalescing = _end_coalescing = _done

    def note(self, op: str, tensors: Iterable[torch.Tensor], peer: int | None = None) -> _Done:
        """Note a call; equal tensors are told once. `peer`: other side of a send or receive, as rank of the group."""
        ranks, tensors = dist.get_process_group_ranks(self), list(tensors)
        self.calls.append(
            Call(
                group=f"{self.backend} {self.group_desc}",
                ranks=tuple(ranks),
                op=op,
                tensors=" ".join(dict.fromkeys(f"{str(one.dtype)[6:]}{list(one.shape)}" for one in tensors)),
                peer=None if peer is None else ranks[peer],
                phase=self.meter.phase,
                place=place(),
                on_cpu=self.backend == "nccl" and any(one.device.type != "cuda" for one in tensors),
            )
        )
        if self.backend == "gloo" or op == "barrier":
            self.meter.wait(f"a {self.backend} {op.partition(' ')[0]}")
        return _Done()

    def barrier(self, *args: Any, **options: Any) -> _Done:
        return self.note("barrier", [])

    def send(self, tensors: Any, peer: int, tag: int = 0) -> _Done:
        return self.note("send", tensors, peer)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> _Done:
        return self.note("receive", tensors, peer)


class RecordingGloo(RecordingGroup):
    backend = "gloo"


def _collective(name: str) -> Any:
    def call(self: RecordingGroup, *args: Any) -> _Done:
        reductions = (f" {one.reduceOp.op.name}" for one in args if hasattr(one, "reduceOp"))
        roots = (f" from or to {one.rootRank}" for one in args if hasattr(one, "rootRank"))
        tensors = (one for one in tree_leaves(args) if isinstance(one, torch.Tensor))
        return self.note("".join((name, *reductions, *roots)), tensors)

    return call


for _name in _COLLECTIVES.split():
    setattr(RecordingGroup, _name, _collective(_name))
