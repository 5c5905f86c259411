"""The files of the actor's checkpoints: names, checksums, and how a folder comes to its name whole.

The checksums find what a disk, a copy or a kill has damaged, and nothing else: whoever can change a file can change the
manifest beside it, whatever the algorithm. Against foreign code stands `checkpoint_pickles`, which looks into every
pickle before it is loaded. So the algorithm is chosen for its speed: XXH3 with 128 bits goes several times as fast as
SHA-256, which earlier manifests name by having no name.

No torch and no ranks here: whoever looks at a checkpoint from outside needs neither.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatron_dapo.actor.step_data import CheckpointDamagedError
from megatron_dapo.storage.durable import replace_file, replace_folder

STATE_FILE = "actor.json"
MANIFEST_FILE = "manifest.json"

READERS = 8
"""Threads that share the files of a checkpoint: a parallel file system is not filled by one."""


ALGORITHM = "xxh3-128"
"""Of the manifests that are written."""

ALGORITHMS: Mapping[str, Callable[[], Any]] = {ALGORITHM: xxhash.xxh3_128, "sha256": hashlib.sha256}
"""A new hash (`update`, `hexdigest`) of each algorithm that is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The checksum of every other file of a checkpoint: `{"algorithm": "xxh3-128", "files": {"common.pt": "..."}}`."""

    files: Mapping[str, str]
    """Digest in hexadecimal by the file's path in the folder."""

    algorithm: str = ALGORITHM

    def text(self) -> str:
        """As JSON."""
        return json.dumps({"algorithm": self.algorithm, "files": dict(self.files)}, indent=1)


def digest_of(file: Path, algorithm: str = ALGORITHM) -> str:
    """Of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, ALGORITHMS[algorithm]).hexdigest()


def read_manifest(file: Path) -> Manifest:
    """What stands in `file`; one without an algorithm is a plain mapping of SHA-256 by file.

    Raises:
        CheckpointDamagedError: it is not there, is damaged, or names an algorithm that is not known.
    """
    if not file.is_file():
        raise CheckpointDamagedError(f"{file} is missing: {file.parent} is no whole checkpoint; load an earlier one")
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointDamagedError(f"{file} is damaged: {error}; load an earlier checkpoint") from error
    named = isinstance(found, dict) and "algorithm" in found
    algorithm, files = (found["algorithm"], found.get("files")) if named else ("sha256", found)
    if not isinstance(files, dict) or not files:
        raise CheckpointDamagedError(f"{file} is damaged: it names no files; load an earlier checkpoint")
    if algorithm not in tuple(ALGORITHMS):
        raise CheckpointDamagedError(
            f"{file}: its checksums are {algorithm!r}; known are {', '.join(ALGORITHMS)}; load an earlier checkpoint, "
            "or take the version that wrote this one"
        )
    return Manifest(algorithm=algorithm, files=files)


def check_there(folder: Path, manifest: Manifest) -> None:
    """CheckpointDamagedError unless every file of the manifest is in `folder`."""
    missing = sorted(name for name in manifest.files if not (folder / name).is_file())
    if missing:
        raise CheckpointDamagedError(
            f"{folder / missing[0]} is missing: the checkpoint is not whole; load an earlier one"
        )


def check_digests(folder: Path, manifest: Manifest, found: Mapping[str, str]) -> None:
    """CheckpointDamagedError unless the files have the sums of the manifest."""
    damaged = sorted(name for name, digest in manifest.files.items() if found[name] != digest)
    if damaged:
        raise CheckpointDamagedError(
            f"{folder / damaged[0]} is damaged: its {manifest.algorithm} is not that of {MANIFEST_FILE}; load an "
            "earlier checkpoint"
        )


def check_whole(folder: Path) -> None:
    """Read every file of a checkpoint and compare it with the manifest, in one process.

    Raises:
        CheckpointDamagedError: names the first file that is missing or damaged.
    """
    manifest = read_manifest(folder / MANIFEST_FILE)
    check_there(folder, manifest)
    with ThreadPoolExecutor(READERS) as readers:
        digests = readers.map(lambda name: digest_of(folder / name, manifest.algorithm), manifest.files)
        found = dict(zip(manifest.files, digests, strict=True))
    check_digests(folder, manifest, found)


def make_empty(aside: Path) -> None:
    """A fresh folder; what a killed save left there goes."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def put_in_place(aside: Path, folder: Path, digests: Mapping[str, str]) -> None:
    """Write the manifest of `digests` by file and rename `aside` to `folder`. A checkpoint that stands there is deleted
    last."""
    replace_file(aside / MANIFEST_FILE, Manifest(files=digests).text())
    replace_folder(aside, folder, durable=True)
