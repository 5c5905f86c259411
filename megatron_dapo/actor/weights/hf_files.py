"""Folders in Hugging Face format: safetensors read by slices, written in files of bounded size."""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from megatron_dapo.actor.weights.safetensors_file import FilePlan, SafetensorsFile, WeightsError
from megatron_dapo.storage.durable import replace_folder

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


class SafetensorsReader:
    """The tensors of a folder, read slice by slice: `model.safetensors`, or the files that its index names."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._open: dict[str, SafetensorsFile] = {}
        index = self.folder / INDEX_FILE
        if index.exists():
            self._file_of = _weight_map(index)
        elif (self.folder / SINGLE_FILE).exists():
            self._file_of = dict.fromkeys(self._file(SINGLE_FILE).places, SINGLE_FILE)
        else:
            raise WeightsError(f"{self.folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, ignored: set[str]) -> None:
        """Raise WeightsError for a tensor that is missing, not expected, or of another shape than in `shapes`."""
        index = self.folder / INDEX_FILE
        listing = index if index.exists() else self.folder / SINGLE_FILE
        for name, shape in shapes.items():
            if name not in self._file_of:
                raise WeightsError(f"{listing}: tensor {name} is missing; the model needs it with shape {list(shape)}")
            found = self._holder(name).places[name].shape
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
        return self._holder(name).read(name, dim, start, stop)

    def pieces(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> Iterator[memoryview]:
        """See SafetensorsFile.pieces."""
        return self._holder(name).pieces(name, start, stop, columns)

    def dtype(self, name: str) -> torch.dtype:
        return self._holder(name).places[name].dtype

    def file(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self.folder / self._file_of[name]

    def _holder(self, name: str) -> SafetensorsFile:
        file = self._file_of[name]
        try:
            holder = self._file(file)
        except FileNotFoundError as error:
            raise WeightsError(f"{self.folder / file} is missing; it holds tensor {name}") from error
        except OSError as error:
            raise WeightsError(f"{self.folder / file}: {error.strerror}; it holds tensor {name}") from error
        if name not in holder.places:
            raise WeightsError(f"{self.folder / file}: tensor {name} is missing, though {INDEX_FILE} says it is there")
        return holder

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._open:
            self._open[name] = SafetensorsFile(self.folder / name)
        return self._open[name]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        file_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{index} is damaged ({error!r})") from error
    for name, file in file_of.items():
        if not isinstance(file, str):
            raise WeightsError(f"{index} is damaged: tensor {name} is said to be in {file!r}, which is no file's name")
    return file_of


@dataclass(frozen=True, kw_only=True)
class FolderPlan:
    """Which file each tensor goes to, filled in the given order up to `max_bytes` (a larger tensor has one alone).

    Fixed before anything is written, so that any process can put any tensor in its place.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    max_bytes: int

    @cached_property
    def files(self) -> dict[str, FilePlan]:
        """By file name."""
        parts: list[dict[str, tuple[int, ...]]] = [{}]
        filled = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape) * self.dtype.itemsize
            if parts[-1] and filled + size > self.max_bytes:
                parts.append({})
                filled = 0
            parts[-1][name] = shape
            filled += size
        count = len(parts)
        names = [SINGLE_FILE]
        if count > 1:
            names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        return {name: FilePlan(shapes=part, dtype=self.dtype) for name, part in zip(names, parts, strict=True)}

    @cached_property
    def file_of(self) -> dict[str, str]:
        """By tensor name."""
        return {name: file for file, plan in self.files.items() for name in plan.shapes}

    def create(self, folder: Path) -> None:
        """An empty folder with every file's header and room, and the index where there are several."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, plan in self.files.items():
            plan.create(folder / file)
        if len(self.files) > 1:
            total = sum(plan.total_bytes for plan in self.files.values())
            index = {"metadata": {"total_size": total}, "weight_map": self.file_of}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, folder: Path, name: str, tensor: Tensor) -> None:
        file = self.file_of[name]
        self.files[file].write(folder / file, name, tensor)

    def finish(self, partial: Path, folder: Path, companions: Path) -> int:
        """Copy config and tokenizer from the folder `companions`, put `partial` in the place of `folder`, return the
        bytes of its files.

        A folder that is already there is replaced; its readers keep what they have open. The config's `dtype` becomes
        that of the weights.
        """
        copy_companions(companions, partial)
        _set_dtype(partial / "config.json", self.dtype)
        written = sum(file.stat().st_size for file in partial.iterdir())
        replace_folder(partial, folder)
        return written


class SafetensorsWriter:
    """Writes tensors as they come, aside until `finish`; none is held."""

    def __init__(self, folder: Path, plan: FolderPlan):
        self.folder = Path(folder)
        self.partial = partial_folder(self.folder)
        self.plan = plan
        self._waiting = set(plan.shapes)
        plan.create(self.partial)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, which is on the CPU."""
        self.plan.write(self.partial, name, tensor)
        self._waiting.remove(name)

    def finish(self, companions: Path) -> int:
        """See FolderPlan.finish."""
        if self._waiting:
            raise WeightsError(f"{self.folder}: never written: {', '.join(sorted(self._waiting))}")
        return self.plan.finish(self.partial, self.folder, companions)


def partial_folder(folder: Path) -> Path:
    """Where `folder` is written before it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def copy_companions(source: Path, target: Path) -> None:
    """Copy config, generation config and tokenizer, those that are there."""
    for name in COMPANION_FILES:
        if (Path(source) / name).exists():
            shutil.copyfile(Path(source) / name, target / name)


def _set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    fields = json.loads(config_file.read_text())
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in fields] or ["torch_dtype"]
    if any(fields.get(key) != name for key in keys):
        fields.update(dict.fromkeys(keys, name))
        config_file.write_text(json.dumps(fields, indent=2) + "\n")
