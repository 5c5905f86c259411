"""The files of the actor's checkpoints: names, checksums, and how a folder comes to its name whole.

The checksums find what a disk, a copy or a kill has damaged, and nothing else: whoever can change a file can change the
manifest beside it, whatever the algorithm. Against foreign code stands `checkpoint_pickles`, which looks into every
pickle before it is loaded. So the algorithm is chosen for its speed: XXH3 with 128 bits goes several times as fast as
SHA-256.

No torch and no ranks here: whoever looks at a checkpoint from outside needs neither.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from megatron_dapo.actor.step_data import CheckpointDamagedError, CheckpointError
from megatron_dapo.config.actor_config import LayoutConfig, LoraConfig, OptimizerConfig
from megatron_dapo.storage.durable import replace_file, replace_folder

STATE_FILE = "actor.json"
MANIFEST_FILE = "manifest.json"

CONVERT = "convert it to a Hugging Face folder and give that as model.path, to start from its weights"

READERS = 8
"""Threads that share the files of a checkpoint: a parallel file system is not filled by one."""

ALGORITHM = "xxh3-128"
"""Of the manifest's checksums."""


def state_text(
    optimizer_steps: int, layout: LayoutConfig, *, distributed_optimizer: bool | None, extra: Any = None
) -> str:
    """Content of `actor.json`.

    Args:
        layout: the one that wrote the checkpoint; the one that reads may differ.
        distributed_optimizer: state of the distributed and of the plain optimizer do not interchange. None: a model
            without any.
        extra: if the model is adapters alone, {"lora": asdict(actor.lora), "base": digest of the other weights}; and
            `actor.optimizer.compact`, if it is not none.
    """
    state = {"optimizer_steps": optimizer_steps, "layout": asdict(layout)}
    return json.dumps(state | {"distributed_optimizer": distributed_optimizer, "extra": extra or {}}, indent=1)


def read_state(folder: Path, *, optimizer: OptimizerConfig, lora: LoraConfig, base: str = "") -> dict[str, Any]:
    """What `state_text` wrote.

    Raises:
        CheckpointError: `actor.optimizer.distributed` or `compact`, `actor.lora` or `base` (unless empty) is another
            one, or there is no optimizer state.
        CheckpointDamagedError: the file is missing or damaged.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
        kind = state["distributed_optimizer"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(f"{folder / STATE_FILE} is damaged: {error!r}") from None
    if kind is None:
        raise CheckpointError(f"{folder}: holds a model without optimizer state, so no run goes on from it; {CONVERT}")
    if kind != optimizer.distributed:
        raise CheckpointError(f"{folder}: set actor.optimizer.distributed={str(kind).lower()}, as it was written with")
    if (compact := state["extra"].get("compact", "none")) != optimizer.compact:
        raise CheckpointError(f"{folder}: set actor.optimizer.compact={compact}, as it was written with")
    stored = state["extra"].get("lora", {"rank": 0})
    if stored != (json.loads(json.dumps(asdict(lora))) if lora.rank else {"rank": 0}):
        raise CheckpointError(f"{folder}: was written with actor.lora = {stored}; set these, or {CONVERT}")
    if base and state["extra"]["base"] != base:
        raise CheckpointError(f"{folder}: its adapters were trained on other weights; set model.path to those")
    return state


def digest_of(file: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def read_manifest(folder: Path) -> dict[str, str]:
    """Checksum in hexadecimal of every other file of a checkpoint, by its path in the folder.

    The file holds `{"algorithm": "xxh3-128", "files": {"common.pt": "..."}}`.

    Raises:
        CheckpointDamagedError: it is damaged or names an algorithm that is not known; or it is not there, or a file
            that it names.
    """
    file = folder / MANIFEST_FILE
    try:
        found = json.loads(file.read_text())
        algorithm, files = found["algorithm"], dict(found["files"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise _damaged(f"{file} is damaged: {error!r}") from error
    if algorithm != ALGORITHM:
        raise _damaged(f"{file}: its checksums are {algorithm!r}, of another version; take the one that wrote it")
    if missing := sorted(name for name in files if not (folder / name).is_file()):
        raise _damaged(f"{folder / missing[0]} is missing: the checkpoint is not whole")
    return files


def check_whole(
    folder: Path, share: slice = slice(None), gather: Callable[[Any], list[Any]] = lambda own: [own]
) -> None:
    """Read every file of a checkpoint and compare it with the manifest.

    Args:
        share: where several processes check together, the part of the sorted files that this one reads.
        gather: every process's digests by file.

    Raises:
        CheckpointDamagedError: names the first file that is missing or damaged.
    """
    wanted = read_manifest(folder)
    names = sorted(wanted)
    with ThreadPoolExecutor(READERS) as readers:
        own = dict(zip(names[share], readers.map(lambda name: digest_of(folder / name), names[share]), strict=True))
    found = {name: digest for part in gather(own) for name, digest in part.items()}
    if damaged := [name for name in names if found[name] != wanted[name]]:
        raise _damaged(f"{folder / damaged[0]} is damaged: its checksum is not that of {MANIFEST_FILE}")


def put_in_place(aside: Path, folder: Path, digests: Mapping[str, str]) -> None:
    """Write the manifest of `digests` by file and rename `aside` to `folder`. A checkpoint that stands there is deleted
    last."""
    replace_file(aside / MANIFEST_FILE, json.dumps({"algorithm": ALGORITHM, "files": dict(digests)}, indent=1))
    replace_folder(aside, folder, durable=True)


def _damaged(what: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(f"{what}; load an earlier checkpoint")
