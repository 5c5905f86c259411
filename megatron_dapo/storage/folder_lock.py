"""The lock of a folder that one process uses at a time."""

import errno
from pathlib import Path

from filelock import FileLock, Timeout

NAME = ".lock"

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class FolderHeld(RuntimeError):
    """Another process holds the folder."""


def lock_folder(folder: Path) -> FileLock:
    """Returns the lock, held. The kernel gives it free when this process ends, however it ends.

    Raises:
        FolderHeld: another process holds it.
        OSError: the lock file cannot be written, or the file system has no locks. A file that merely is there would be
            no lock: a killed holder leaves it, and the next one could not tell.
    """
    lock = FileLock(str(folder / NAME), fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FolderHeld from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise OSError(
            error.errno,
            "its file system has no locks (flock), by which two runs are kept apart; have it mounted with them "
            "(Lustre: -o flock, NFS: its lock service) or take another",
            str(folder),
        ) from None
    return lock
