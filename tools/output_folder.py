"""A folder that one command writes into at a time."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dapo.storage.durable import FolderHeld, lock_folder, naming


class FolderInUse(RuntimeError):
    """Another command writes into the folder; the message names it."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes the folder and holds it. The kernel gives it free when this process ends, however it ends.

    Raises:
        FolderInUse: another process holds it.
        OSError: it cannot be made, written or locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    holder = folder / ".holder"
    try:
        lock = lock_folder(folder)
    except FolderHeld:
        who = holder.read_text(encoding="utf-8").strip() if holder.exists() else "another process"
        raise FolderInUse(f"--out {folder}: {who} writes there; wait for it or name another folder") from None
    try:
        with naming(holder):
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()} ({' '.join(sys.argv)[:200]})\n")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
