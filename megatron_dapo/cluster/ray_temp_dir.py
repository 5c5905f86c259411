"""The folder of a run's own Ray: its sockets and logs, and what killed runs have left of theirs."""

import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from megatron_dapo.storage.durable import LOCK_NAME, FolderHeld, lock_folder

PREFIX = "dapo-ray-"
LONGEST_PARENT = 24
"""Characters; Ray adds about 80 of its own to the folder that it is given, and a Unix socket's path may have 107."""


class RayFolder:
    """A folder of this process's own until `remove`."""

    def __init__(self) -> None:
        """Makes it, and removes those of runs that are gone.

        Raises:
            OSError: it cannot be made or locked.
        """
        parent = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < LONGEST_PARENT else "/tmp")
        for left in parent.glob(f"{PREFIX}*"):
            remove_if_dead(left)
        self._lock, self.path = _make(parent)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def remove_if_dead(folder: Path) -> None:
    """Removes a folder of this user's runs which no process holds; another one stays.

    One without a lock file stays too: its run may be about to take the lock.
    """
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / LOCK_NAME).exists():
            return
        lock = lock_folder(folder)
    except (FolderHeld, OSError):  # somebody's own, or gone meanwhile
        return
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()


def _make(parent: Path) -> tuple[FileLock, Path]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            return lock_folder(folder), folder
        except (FolderHeld, FileNotFoundError):
            continue  # another run, starting too, took it for a dead one's between the two
