"""The weights of a run: which are its newest, a snapshot of a version that outlives the run's own copy, a fingerprint
that tells versions apart."""

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path

from megatron_dapo.diagnostics.response_log import EvaluationError
from megatron_dapo.monitor.statistics import EVALUATIONS

KEPT = Path(EVALUATIONS) / ".kept"
"""In a run directory: the weights that an evaluation of it is about, until it is finished."""

_PIECE = 1 << 20
"""Bytes read at both ends of a file for the fingerprint."""


def versions(folder: Path) -> list[int]:
    """N of each vN in a folder of weights, oldest first."""
    names = [each.name for each in folder.glob("v*")]
    return sorted(int(name[1:]) for name in names if name[1:].isdigit())


def newest_weights(run: Path) -> tuple[Path, int | None]:
    """The exported model of a run that has ended, else the newest version that its servers read from disk, with its
    number.

    Raises:
        EvaluationError: there are neither.
    """
    if _exported(run):
        return run / "model", None
    for version in reversed(versions(run / "weights")):
        if (run / "weights" / f"v{version}" / "config.json").is_file():
            return run / "weights" / f"v{version}", version
    raise EvaluationError(
        f"{run}: no weights in Hugging Face format below model/ or weights/: wait for the run's first ones (with "
        "rollout.weight_sync=disk), or convert a checkpoint with tools/convert_checkpoint.py and name its folder "
        "(eval --model FOLDER; bisect CONFIG.yaml model.path=FOLDER)"
    )


def evaluated_weights(run: Path) -> tuple[Path, int | None]:
    """The exported model of a run, else a snapshot: of the version at which an evaluation was stopped, or of the newest
    one. And the version's number.

    Raises:
        EvaluationError: there are no weights yet.
    """
    begun = versions(run / KEPT)
    if begun and not _exported(run):  # a snapshot outlives the run's own copy
        return run / KEPT / f"v{begun[-1]}", begun[-1]
    source, version = newest_weights(run)
    if version is None:
        return source, None
    if not snapshot(source, run / KEPT / source.name):
        raise EvaluationError(f"{run}: version {version} was removed by the run meanwhile; try again")
    return run / KEPT / source.name, version


def _exported(run: Path) -> bool:
    return (run / "summary.json").exists() and (run / "model" / "config.json").is_file()


def snapshot(source: Path, target: Path) -> bool:
    """Make `target` hold the files of `source`, which may be removed at any moment: as hard links, which cost nothing,
    or as copies where the file system has none. False if `source` was removed meanwhile; there is no target then."""
    aside = target.with_name(f"{target.name}.tmp")
    for old in (target, aside):
        shutil.rmtree(old, ignore_errors=True)
    aside.mkdir(parents=True)
    with suppress(FileNotFoundError):
        for file in sorted(source.iterdir()):
            _link_or_copy(file, aside / file.name)
        if {file.name for file in source.iterdir()} == {file.name for file in aside.iterdir()}:
            os.replace(aside, target)
            return True
    shutil.rmtree(aside)
    return False


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)  # which fails too where there is no source any more


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
