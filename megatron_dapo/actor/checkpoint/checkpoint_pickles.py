"""No code of a stranger's: what a distributed checkpoint holds as pickle is looked at before anything loads it.

Torch's distributed format keeps its index (`.metadata`) as a pickle, and what is not a tensor inside the shard files.
Both are loaded in full by torch, so a checkpoint that someone was handed could run anything. Here the index is read by
an unpickler that knows only the classes of that format, and each value that is no tensor by torch's own check of what
`weights_only` would refuse. So is `common.pt`: torch reads it and all tensors with `weights_only`, but then its own
words advise to go on without.
"""

import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron_dapo.actor.step_data import CheckpointError

INDEX_FILE = ".metadata"

_KNOWN = {
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((metadata.__name__, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
}


def refuse_foreign_code(folder: Path) -> None:
    """Read what is pickled in `folder` without running any of it.

    Raises:
        CheckpointError: it would call something that a checkpoint has no need of, or points out of the folder; names
            the file and the callable.
    """
    index, common = read_index(folder), folder / "common.pt"
    if common.exists():  # Megatron-Core 0.16 writes one
        _check_value(common, "of all ranks", 0, common.stat().st_size)
    for place, info in (index.storage_data or {}).items():
        if isinstance(index.state_dict_metadata.get(place.fqn), BytesStorageMetadata):
            _check_value(folder / info.relative_path, place.fqn, info.offset, info.length)


def read_index(folder: Path) -> Metadata:
    """`.metadata`: what the checkpoint holds and where it stands.

    Raises:
        CheckpointError: missing, damaged, of another kind, or as `refuse_foreign_code`.
    """
    file = folder / INDEX_FILE
    try:
        with file.open("rb") as stream:
            index = _IndexUnpickler(stream, file).load()
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes fail to unpickle in any way
        raise CheckpointError(f"{file} cannot be read: {error}; load an earlier checkpoint") from None
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{file} holds a {type(index).__name__}, not the index of a checkpoint")
    for place in (index.storage_data or {}).values():
        if Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{file}: points to {place.relative_path!r}, which is not a file of {folder}")
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of the format's index, torch's dtypes, and nothing else."""

    def __init__(self, stream: Any, file: Path) -> None:
        super().__init__(stream)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(_refusal(self._file, [f"{module}.{name}"]))


def _check_value(file: Path, key: str, offset: int, length: int) -> None:
    with file.open("rb") as stream:
        stream.seek(offset)
        value = io.BytesIO(stream.read(length))
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(value)
    except Exception as error:
        raise CheckpointError(f"{file}: value {key} cannot be read ({error}); load an earlier checkpoint") from None
    if unknown:
        raise CheckpointError(f"{_refusal(file, unknown)} (value {key})")


def _refusal(file: Path, names: Iterable[str]) -> str:
    told = "it was not loaded. Do not trust where it came from"
    return f"{file}: would call {', '.join(sorted(names))} when it is loaded, which no checkpoint needs; {told}"
