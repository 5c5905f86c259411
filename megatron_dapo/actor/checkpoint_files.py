"""The files of the actor's checkpoints: names, checksums, and how a folder comes to its name whole.

No torch and no ranks here: whoever looks at a checkpoint from outside needs neither.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_dapo.actor.messages import CheckpointDamagedError

STATE_FILE = "actor.json"
MANIFEST_FILE = "manifest.json"

READERS = 8
"""Threads that share the files of a checkpoint: a parallel file system is not filled by one."""


def sha256(file: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(file: Path) -> dict[str, str]:
    """SHA-256 by file name.

    Raises:
        CheckpointDamagedError: it is not there, or damaged.
    """
    if not file.is_file():
        raise CheckpointDamagedError(f"{file} is missing: {file.parent} is no whole checkpoint; load an earlier one")
    try:
        manifest = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointDamagedError(f"{file} is damaged: {error}; load an earlier checkpoint") from error
    if not isinstance(manifest, dict) or not manifest:
        raise CheckpointDamagedError(f"{file} is damaged: it names no files; load an earlier checkpoint")
    return manifest


def check_there(folder: Path, manifest: Mapping[str, str]) -> None:
    """CheckpointDamagedError unless every file of the manifest is in `folder`."""
    missing = sorted(name for name in manifest if not (folder / name).is_file())
    if missing:
        raise CheckpointDamagedError(
            f"{folder / missing[0]} is missing: the checkpoint is not whole; load an earlier one"
        )


def check_digests(folder: Path, manifest: Mapping[str, str], found: Mapping[str, str]) -> None:
    """CheckpointDamagedError unless the files have the sums of the manifest."""
    damaged = sorted(name for name, digest in manifest.items() if found[name] != digest)
    if damaged:
        raise CheckpointDamagedError(
            f"{folder / damaged[0]} is damaged: its SHA-256 is not that of {MANIFEST_FILE}; load an earlier checkpoint"
        )


def check_whole(folder: Path) -> None:
    """Read every file of a checkpoint and compare it with the manifest, in one process.

    Raises:
        CheckpointDamagedError: names the first file that is missing or damaged.
    """
    manifest = read_manifest(folder / MANIFEST_FILE)
    check_there(folder, manifest)
    with ThreadPoolExecutor(READERS) as readers:
        digests = dict(zip(manifest, readers.map(lambda name: sha256(folder / name), manifest), strict=True))
    check_digests(folder, manifest, digests)


def make_empty(aside: Path) -> None:
    """A fresh folder; what a killed save left there goes."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def write_synced(file: Path, text: str) -> None:
    """Returns when `text` is on disk."""
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def put_in_place(aside: Path, folder: Path, digests: Mapping[str, str]) -> None:
    """Write the manifest and rename `aside` to `folder`. A checkpoint that stands there is deleted last."""
    write_synced(aside / MANIFEST_FILE, json.dumps(digests, indent=1))
    old = folder.with_name(f"{folder.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
