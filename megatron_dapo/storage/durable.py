"""Files that survive a kill, a full disk and a power cut: replaced whole or not at all, synced where a resume needs
them, cut back to whole lines, and folders locked by one process at a time.

After a write the content may still be in the page cache, after a rename the name: `sync_*` return when it is on disk.
"""

import errno
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

LOCK_NAME = ".lock"

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A full disk is noticed by `write` or `fsync`, which know no name: such an OSError gets `path` for its file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from None


def sync(path: Path) -> None:
    """Returns when the content of a file, or the names in a folder, are on disk, whoever wrote them."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Returns when `folder`, everything below it and its own name are on disk, whoever wrote it."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        sync(path)


def replace_file(file: Path, content: str | bytes, *, durable: bool = True, private: bool = False) -> None:
    """Write a file whole or not at all.

    Args:
        durable: it is on disk on return, whatever becomes of the machine.
        private: only its owner may read it.
    """
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    partial = file.with_name(f".{file.name}.tmp")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666)
    with naming(partial), open(descriptor, "wb") as stream:
        stream.write(data)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())
    os.replace(partial, file)
    if durable:
        sync(file.parent)


def replace_folder(partial: Path, folder: Path, *, durable: bool = False) -> None:
    """Rename `partial` to `folder`. What stood there is deleted last, under the name `.<folder>.old`.

    Args:
        durable: the names in it and its own are on disk on return; the content of its files is the caller's to sync.
    """
    if durable:
        sync(partial)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    if durable:
        sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Delete it. Renamed first: a kill in between must not leave a part of it under its name."""
    old = folder.with_name(f".{folder.name}.{time.time_ns()}.old")
    os.rename(folder, old)
    shutil.rmtree(old, ignore_errors=True)  # NFS keeps a file that somebody has open


def drop_torn_line(file: Path) -> None:
    """Cut off what follows the last newline of `file`: what is appended next would else become part of it."""
    if not file.exists():
        return
    with file.open("rb+") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 1))
        if stream.read() not in (b"", b"\n"):
            stream.seek(0)
            stream.truncate(stream.read().rfind(b"\n") + 1)


def append_lines(file: Path, lines: Iterable[str], *, durable: bool = False) -> None:
    """Add lines behind the last whole one. They are with the system on return, so that the death of this process cannot
    lose them.

    Args:
        durable: they are on disk, whatever becomes of the machine.
    """
    drop_torn_line(file)
    with naming(file), file.open("a", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in lines)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())


def whole_lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """(`file:number`, its text) of each line, but for a last one that a kill has torn."""
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), start=1):
        yield f"{file}:{number}", line


class FolderHeld(RuntimeError):
    """Another process holds the folder. The message says what to do."""

    exit_code = 2


def lock_folder(folder: Path) -> AcquireReturnProxy:
    """Returns the lock, held, as a context that lets it go. The kernel gives it free when this process ends, however it
    ends.

    Raises:
        FolderHeld: another process holds it.
        OSError: the lock file cannot be written, or the file system has no locks. A file that merely is there would be
            no lock: a killed holder leaves it, and the next one could not tell.
    """
    lock = FileLock(str(folder / LOCK_NAME), fallback_to_soft=False)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        names = "`megatron-dapo status` names that of a run"
        raise FolderHeld(f"{folder}: another process writes there ({names}); wait for it, or name another") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        remedy = "have it mounted with them (Lustre: -o flock, NFS: its lock service) or take another"
        told = f"its file system has no locks (flock), by which two runs are kept apart; {remedy}"
        raise OSError(error.errno, told, str(folder)) from None
