"""One trainer rank's part of the timeline: its calls, their passes, and the memory that each call came to."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.monitor.timeline import SpanFile

if TYPE_CHECKING:
    from megatron_dapo.actor.actor import MegatronActor


class RankTimeline:
    """Writes `timeline/rank<N>.jsonl`."""

    def __init__(self, run_dir: Path, actor: "MegatronActor") -> None:
        self._actor = actor
        about = {
            "rank": actor.rank,
            "stages": actor.config.layout.pipeline,
            "chunks": len(actor.optimizer.chunks),  # that each micro-batch passes on this rank
        }
        self._file = SpanFile(run_dir, f"rank{actor.rank}", about | actor.place())

    @contextmanager
    def call(self, step: int, method: str) -> Iterator[None]:
        """Record what runs inside as rollout step `step`'s call of `method`."""
        self._file.begin(step)
        on_cuda = self._actor.device.device.type == "cuda"
        _forget_peak(on_cuda=on_cuda)
        began = time.time()
        with self._actor.timed() as clock:
            yield
        passes = clock.times()
        self._file.add("calls", method, began, time.time(), **_peak(on_cuda=on_cuda))
        if method == "update":
            self._probe(max((about.get("tokens", 0) for *_, about in passes), default=0))
        for name, start, end, about in passes:
            self._file.add(method, name, start, end, **about)
        self._file.write()

    def _probe(self, tokens: int) -> None:
        began = time.time()
        measured = self._actor.time_tensor_parallel(tokens) if tokens else None
        if measured is not None:
            self._file.add("probe", "all-reduce", began, time.time(), **measured)


def _forget_peak(*, on_cuda: bool) -> None:
    if on_cuda:
        import torch

        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # a container may forbid it; the peak is then that of the whole life
        Path("/proc/self/clear_refs").write_text("5")


def _peak(*, on_cuda: bool) -> dict[str, Any]:
    """Most memory since `_forget_peak`: that of the device, or on a CPU the process's own."""
    if on_cuda:
        import torch

        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "memory": "device",
        }
    status = Path("/proc/self/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return {"peak_bytes": int(kilobytes) * 1024, "memory": "process"}
