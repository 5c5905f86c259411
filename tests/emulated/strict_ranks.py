"""Runs a function on ranks whose process groups are strict, on tensors of the emulated device."""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.actor.gloo import ForkedRanks
from tests.emulated import strict_board
from tools.rank_pool import RankPlace

GPU = torch.device("cuda", 0)

START_S = 120
"""Within which the processes of a call have to be there."""


def join(place: RankPlace, backend: str, *, bound: bool = False) -> None:
    """The default group of a case; `bound` to a device as the project's is."""
    dist.init_process_group(
        backend,
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.world_size,
        device_id=GPU if bound else None,
    )


def full(value: float, *shape: int, backend: str, **options: Any) -> torch.Tensor:
    """On the emulated device; on the host for plain gloo."""
    return torch.full(shape, float(value), device=GPU if backend == "nccl" else "cpu", **options)


@dataclass(frozen=True, kw_only=True)
class Broken:
    """What a rank's function raised instead of returning: a rule that it broke, or a hang."""

    kind: str
    text: str
    trace: str


class StrictRanks:
    """Fresh processes, for nothing else: each is patched for good by its first call."""

    def __init__(self) -> None:
        self._pool = ForkedRanks()

    def run(
        self,
        n: int,
        function: Callable[..., Any],
        *args: Any,
        patience_s: float = 60,
        timeout_s: float = 240,
    ) -> list[Any]:
        """Results of `function(place, *args)` in rank order; a `Broken` where it raised a StrictError."""
        return self._pool.run(n, _on_rank, function, args, patience_s, timeout_s=timeout_s)

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def _on_rank(place: RankPlace, function: Callable[..., Any], args: tuple[Any, ...], patience_s: float) -> Any:
    os.environ[strict_board.PATIENCE] = str(patience_s)
    _install_once()
    _start_together(place)
    try:
        return function(place, *args)
    except strict_board.StrictError as error:
        return Broken(kind=type(error).__name__, text=str(error), trace=traceback.format_exc())


def _install_once() -> None:
    from tests.emulated import strict_device, strict_nccl, strict_stream

    if not isinstance(strict_stream.device, strict_device.EmulatedDevice):
        strict_nccl.install(emulated_device=True)
        strict_device.answer_megatron(strict_stream.device)
        torch.accelerator.current_stream = torch.cuda.current_stream  # PyTorch's optimizers ask it
    dist.distributed_c10d._world.group_count = 0  # a case that broke while it made its first group leaves it higher
    strict_stream.device.flying.clear()
    strict_nccl.faults.clear()
    strict_nccl.log.clear()


def _start_together(place: RankPlace) -> None:
    """The start of a process is no part of a case's patience."""
    store = dist.FileStore(f"{place.rendezvous.removeprefix('file://')}-start", place.world_size)
    store.set(f"here/{place.rank}", "")
    store.wait([f"here/{rank}" for rank in range(place.world_size)], timedelta(seconds=START_S))
