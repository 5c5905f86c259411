"""How much memory this process may still take on its host: what is free, and what its control groups allow.

Slurm and container runtimes bound a job's memory by control groups, of which the host's own figures know nothing: a
process that takes more is killed.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
"""Files of limit and use, and the key in memory.stat of cached file pages that are given up first."""


def available_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that can be taken without swapping and without being killed.

    Args:
        groups: where the control groups are mounted.
        own: the file that names this process's ones.
    """
    return min([psutil.virtual_memory().available, *_left(groups, own)])


def _left(groups: Path, own: Path) -> Iterator[int]:
    """What each group above this process leaves; nothing for those without a limit."""
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top, files = groups, VERSION_2
        elif "memory" in controllers.split(","):
            top, files = groups / "memory", VERSION_1
        else:
            continue
        folder = top / name.lstrip("/")
        for level in (folder, *folder.parents):
            if level.is_relative_to(top):
                yield from _left_by(level, *files)


def _left_by(group: Path, limit_file: str, use_file: str, cache_key: str) -> Iterator[int]:
    limit = _read(group / limit_file)
    if limit.isdigit():  # else "max", or no such file
        stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
        yield max(0, int(limit) - int(_read(group / use_file) or 0) + int(stat.get(cache_key, 0)))


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
