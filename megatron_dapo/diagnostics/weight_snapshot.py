"""A version of a run's weights, kept as it is while the run goes on and removes its own."""

import hashlib
import os
import shutil
from pathlib import Path

from megatron_dapo.diagnostics.response_log import EvaluationError

_PIECE = 1 << 20
"""Bytes read at both ends of a file for the fingerprint."""


def freeze(source: Path, target: Path) -> bool:
    """Make `target` hold the files of `source`, which may be removed at any moment: as hard links, which cost nothing,
    or as copies where the file system has none. False if `source` was removed meanwhile; there is no target then."""
    shutil.rmtree(target, ignore_errors=True)
    aside = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        for file in sorted(source.iterdir()):
            _link_or_copy(file, aside / file.name)
        complete = {file.name for file in source.iterdir()} == {file.name for file in aside.iterdir()}
    except FileNotFoundError:
        complete = False
    if not complete:
        shutil.rmtree(aside)
        return False
    os.replace(aside, target)
    return True


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def versions(folder: Path) -> list[int]:
    """N of each vN in a folder of weights, oldest first."""
    names = [each.name for each in folder.glob("v*")]
    return sorted(int(name[1:]) for name in names if name[1:].isdigit())


def fingerprint(folder: Path) -> str:
    """Of the model in a folder: the config, and of each weight file its size and a megabyte from both ends. Another
    step of training has another one.

    Raises:
        EvaluationError: the folder holds no model in Hugging Face format.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise EvaluationError(
            f"{folder}: no model in Hugging Face format (config.json, *.safetensors); "
            "python -m tools.convert_checkpoint makes one of a checkpoint"
        )
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(_PIECE))
            content.seek(max(0, size - _PIECE))
            digest.update(content.read(_PIECE))
    return digest.hexdigest()[:16]
