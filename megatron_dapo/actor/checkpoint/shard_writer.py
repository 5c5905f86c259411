"""One rank's shards of a checkpoint, written while the rank goes on training, or at once.

Torch's own writer plans, copies and writes in one call. Here the plan is made by torch, with all ranks; then the rank
copies its shards to host memory (`copy`), which is all that training waits for; a thread writes and hashes them. No
collective runs beside training: the ranks exchange what they wrote when the save is finished.

Megatron-Core's own asynchronous save (0.16 and 0.19) hands the copies to a process, forked from this one with all its
threads, or spawned, which imports the caller's main module once more. Neither is safe in a Ray actor.

Whether a host has room for the copies: Slurm and container runtimes bound a job's memory by control groups, of which
the host's own figures know nothing; a process that takes more is killed (`available_bytes`).
"""

import concurrent.futures
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_dapo.actor.checkpoint.checkpoint_files import digest_of
from megatron_dapo.actor.offload import to_pageable

VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
"""Files of limit and use, and the key in memory.stat of cached file pages that are given up first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a rank wrote, or why it could not."""

    results: list[WriteResult]
    digests: dict[str, str]
    """Checksums for the manifest, by file name."""

    failure: str | None = None


class ShardWriter(FileSystemWriter):
    """To be given to torch's `save`, which then only plans; `copy` and `start` or `write` follow."""

    _plan: SavePlan
    _metadata: Metadata
    """On rank 0."""

    def __init__(self, folder: Path, live: frozenset[int]) -> None:
        """`live`: addresses of the storages that training changes."""
        # Nothing is copied ahead: the copies of tensors on CUDA would wait for training's own stream.
        super().__init__(folder, per_thread_copy_ahead=0)
        self._folder, self._live = Path(folder), live
        self._data: dict[MetadataIndex, Any] = {}
        self.written = concurrent.futures.Future[Written]()
        """What `write` comes to."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Torch's call to write: keeps the plan and what it refers to."""
        self._plan = plan
        self._data = {item.index: planner.resolve_data(item) for item in plan.items}
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Torch's last call, on rank 0: keeps what the index needs beside the places of the shards."""
        self._metadata = metadata

    @property
    def bytes_to_copy(self) -> int:
        """Host memory that `copy` takes."""
        return sum(data.nbytes for data in self._data.values() if self._must_copy(data))

    def copy(self) -> None:
        """Take shards that training would change into host memory of their own."""
        for index, data in self._data.items():
            if self._must_copy(data):
                # Not pinned: such memory comes in powers of two, and PyTorch keeps it.
                self._data[index] = to_pageable(data) if data.is_cuda else data.detach().clone()

    def start(self) -> None:
        """Write in a thread, which ends with the process."""
        threading.Thread(target=self.write, name="checkpoint-writer", daemon=True).start()

    def write(self) -> None:
        """Write and hash this rank's files. Whatever goes wrong is for `written` to say."""
        try:
            # In the planner's place: hands each shard out once, so that its memory is freed on the way.
            planner = cast(SavePlanner, SimpleNamespace(resolve_data=self._hand_out))
            results = FileSystemWriter.write_data(self, self._plan, planner).value()
            names = sorted({result.storage_data.relative_path for result in results})
            written = Written(results=results, digests={name: digest_of(self._folder / name) for name in names})
        except Exception as error:
            written = Written(results=[], digests={}, failure=_reason(error))
        self._data = {}
        self.written.set_result(written)

    def write_index(self, results: list[list[WriteResult]]) -> None:
        """On rank 0: the file that says where every shard of every rank stands."""
        super().finish(self._metadata, results)

    def _hand_out(self, item: Any) -> Any:
        data = self._data.pop(item.index)
        return to_pageable(data) if isinstance(data, torch.Tensor) else data

    def _must_copy(self, data: Any) -> bool:
        return isinstance(data, torch.Tensor) and (data.is_cuda or data.untyped_storage()._cdata in self._live)


def _reason(error: BaseException) -> str:
    """The operating system's word, where there is one: over a full disk torch says "unexpected pos 704 vs 598"."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError):
            return str(at)
        at = at.__cause__ or at.__context__
    return f"{type(error).__name__}: {error}"


def available_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can be taken without swapping and without being killed.

    Args:
        groups: where the control groups are mounted.
        own: the file that names this process's ones.
    """
    available = [psutil.virtual_memory().available]
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (groups / "memory", VERSION_1) if controllers else (groups, VERSION_2)
        folder = top / name.lstrip("/")
        available += [left for level in (folder, *folder.parents) if (left := _left_by(level, *names)) is not None]
    return min(available)


def _left_by(group: Path, limit_file: str, use_file: str, cache_key: str) -> int | None:
    """What one group leaves; None: it has no limit, or is none."""
    limit = _read(group / limit_file)
    if not limit.isdigit():  # "max", or no such file
        return None
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    return max(0, int(limit) - int(_read(group / use_file) or 0) + int(stat.get(cache_key, 0)))


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
