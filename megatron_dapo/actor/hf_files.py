"""Folders in Hugging Face format: safetensors read by slices, written in shards of bounded size."""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class WeightsError(ValueError):
    """Weights that do not fit the model; the message names the tensor and the file."""


class SafetensorsReader:
    """The tensors of a folder, read slice by slice: `model.safetensors`, or the files that its index names."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        index = self.folder / INDEX_FILE
        if index.exists():
            self._file_of = dict(json.loads(index.read_text())["weight_map"])
        elif (self.folder / SINGLE_FILE).exists():
            self._file_of = dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise WeightsError(f"{self.folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, ignored: set[str]) -> None:
        """Raise WeightsError for a tensor that is missing, not expected, or of another shape than in `shapes`."""
        index = self.folder / INDEX_FILE
        listing = index if index.exists() else self.folder / SINGLE_FILE
        for name, shape in shapes.items():
            if name not in self._file_of:
                raise WeightsError(f"{listing}: tensor {name} is missing; the model needs it with shape {list(shape)}")
            found = tuple(self._slice(name).get_shape())
            if found != shape:
                file = self.folder / self._file_of[name]
                raise WeightsError(f"{file}: tensor {name} has shape {list(found)}, the model needs {list(shape)}")
        extra = sorted(self._file_of.keys() - shapes.keys() - ignored)
        if extra:
            file = self.folder / self._file_of[extra[0]]
            raise WeightsError(
                f"{file}: tensor {extra[0]} ({len(extra)} in all) has no place in the model of config.json"
            )

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1) start to stop of one tensor, on the CPU."""
        lazy = self._slice(name)
        return lazy[start:stop] if dim == 0 else lazy[:, start:stop]

    def _slice(self, name: str) -> Any:
        return self._handle(self._file_of[name]).get_slice(name)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt", device="cpu"))
        return self._open[file]


class SafetensorsWriter:
    """Writes tensors into files of at most `max_bytes` (a larger tensor gets a file of its own), aside until `finish`.

    The files of all tensors are planned from `sizes` (bytes by name), so that they can be written in any memory: one
    file's tensors are held at a time.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int], *, max_bytes: int):
        self.folder = Path(folder)
        self.partial = self.folder.with_name(f".{self.folder.name}.partial")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        self.total_bytes = sum(sizes.values())
        self._file_of = _plan_files(sizes, max_bytes)
        self._waiting = dict(self._file_of)
        self._held: dict[str, dict[str, Tensor]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, contiguous and on the CPU; its file is written when it is the last of it."""
        file = self._waiting.pop(name)
        self._held.setdefault(file, {})[name] = tensor
        if file not in self._waiting.values():
            save_file(self._held.pop(file), self.partial / file, metadata={"format": "pt"})

    def finish(self, source_folder: Path, dtype: torch.dtype) -> int:
        """Copy config and tokenizer from `source_folder`, put the folder in its place, return the bytes of its files.

        A folder that is already there is replaced; its readers keep what they have open. The config's `dtype` becomes
        that of the weights.
        """
        if self._waiting:
            raise WeightsError(f"{self.folder}: never written: {', '.join(sorted(self._waiting))}")
        if set(self._file_of.values()) != {SINGLE_FILE}:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self._file_of}
            (self.partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        for name in COMPANION_FILES:
            if (Path(source_folder) / name).exists():
                shutil.copyfile(Path(source_folder) / name, self.partial / name)
        _set_dtype(self.partial / "config.json", dtype)
        written = sum(file.stat().st_size for file in self.partial.iterdir())
        if self.folder.exists():
            old = self.folder.with_name(f".{self.folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.rename(self.folder, old)
            os.rename(self.partial, self.folder)
            shutil.rmtree(old)
        else:
            os.rename(self.partial, self.folder)
        return written


def _plan_files(sizes: Mapping[str, int], max_bytes: int) -> dict[str, str]:
    """File of each tensor, filled in the given order."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if parts[-1] and filled + size > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return dict.fromkeys(sizes, SINGLE_FILE)
    count = len(parts)
    return {
        name: f"model-{number:05d}-of-{count:05d}.safetensors" for number, part in enumerate(parts, 1) for name in part
    }


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    fields = json.loads(config_file.read_text())
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in fields] or ["torch_dtype"]
    if any(fields.get(key) != name for key in keys):
        fields.update(dict.fromkeys(keys, name))
        config_file.write_text(json.dumps(fields, indent=2) + "\n")
