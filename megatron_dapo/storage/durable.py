"""What a kill, a full disk or a power cut leaves of a file: a write leaves the content to the system, a rename the
names, and the last line of a file that grows by lines may be half a one."""

import os
import shutil
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


def sync_tree(folder: Path) -> None:
    """Returns when `folder`, everything below it and its own name are on disk, whoever wrote it."""
    for path, _, files in os.walk(folder):
        for name in files:
            sync_file(Path(path, name))
        sync_folder(Path(path))
    sync_folder(folder.parent)


def put_in_place(partial: Path, folder: Path) -> None:
    """Rename `partial` to `folder`; a folder that stands there is deleted last."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


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
