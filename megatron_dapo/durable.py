"""What a kill, a full disk or a power cut leaves of a file: a write leaves the content to the system, a rename the
names, and the last line of a file that grows by lines may be half a one."""

import os
from pathlib import Path


def sync_file(file: Path) -> None:
    """Returns when the content of `file` is on disk, whoever wrote it."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Returns when the names in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_torn_line(file: Path) -> None:
    """Cut off what follows the last newline of `file`: what is appended next would else become part of it."""
    if not file.exists():
        return
    with file.open("rb+") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return
        stream.seek(-1, os.SEEK_END)
        if stream.read() == b"\n":
            return
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
