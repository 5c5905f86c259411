"""What is on disk is there after a power cut too: a write leaves the content to the system, a rename the names."""

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
