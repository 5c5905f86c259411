"""What a conversion writes: aside, on a disk that has room for it, and nothing of it stays when it fails."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dapo.actor.weights.hf_files import partial_folder
from megatron_dapo.config.base import ConfigError


@contextmanager
def aside(target: Path, size: int) -> Iterator[Path]:
    """The folder that becomes `target`; not made yet.

    Args:
        size: bytes that will be written. A folder that stands at `target` keeps its own until the end.

    Raises:
        ConfigError: the disk has less room.
    """
    partial = partial_folder(target)
    shutil.rmtree(partial, ignore_errors=True)
    there = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise ConfigError(
            f"{target}: {size / 1e6:,.0f} MB are to be written, {free / 1e6:,.0f} MB are free in {there}; name a "
            "target on another disk"
        )
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
