"""Folders in Hugging Face format: safetensors by positioned reads and writes, in files of bounded size.

A file is 8 bytes with the header's length, the header (JSON: type, shape and place of each tensor), and the tensors'
bytes. Only the bytes asked for are ever in memory. The library's own reader maps the whole file: what has been read of
it then counts to the process's memory until the file is closed. Its writer wants all tensors of a file at once. So the
library only checks the headers.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dapo.actor.weights.quantize import stored_dtype
from megatron_dapo.storage.durable import replace_folder

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
COMPANION_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Of the files beside the weights: config, generation config, tokenizer, chat template."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES["F8_E4M3"] = torch.float8_e4m3fn
"""Of weights, and of FP8 ones that a run wrote for its servers. Other quantized ones mean nothing without their
scales."""

_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNMENT = 8
SAMPLE_BYTES = 2**12
PIECE_BYTES = 2**20
"""Written at a time: Linux takes a few of these faster than one large write."""


class WeightsError(ValueError):
    """Weights that do not fit the model; the message names the tensor and the file."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of an open file; `start` is in bytes from the file's beginning."""

    file: BinaryIO
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def fill(self, target: Tensor, offset: int) -> None:
        """Read the tensor's bytes from `offset` on into the memory of `target`."""
        self.file.seek(self.start + offset)
        if self.file.readinto(bytes_of(target)) < target.nbytes:  # type: ignore[attr-defined]
            raise WeightsError(f"{self.file.name}: a tensor ends with the file, which became shorter meanwhile")


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class SafetensorsReader(AbstractContextManager["SafetensorsReader"]):
    """The tensors of a folder, read slice by slice: `model.safetensors`, or the files that its index names."""

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises WeightsError: one is missing, cut, damaged, or has a tensor of another type."""
        self._listing, files = _listed(Path(folder))
        self._places: dict[str, TensorPlace] = {}
        with ExitStack() as opened:
            for file in files:
                try:
                    with safe_open(file, framework="np"):  # checks that the header is sound and the file not cut
                        self._places |= _places(opened.enter_context(file.open("rb")))
                except (OSError, SafetensorError) as error:
                    raise WeightsError(f"{file}: {error}; fetch it again, as safetensors") from error
            self._opened = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def digest(self) -> str:
        """Tells one model from another, whatever files hold it: of names, shapes and some bytes of every tensor."""
        found = xxhash.xxh3_128()
        for name, place in sorted(self._places.items()):
            size = math.prod(place.shape) * place.dtype.itemsize
            middle = torch.empty(min(size, SAMPLE_BYTES), dtype=torch.uint8)
            place.fill(middle, (size - middle.nbytes) // 2)
            found.update(f"{name} {place.dtype} {place.shape}".encode() + middle.numpy().tobytes())
        return found.hexdigest()

    def check(self, shapes: Mapping[str, tuple[int, ...]], *, ignored: set[str]) -> None:
        """Raise WeightsError for a tensor that is missing, not expected, or of another shape than in `shapes`."""
        for name, shape in shapes.items():
            if name not in self._places:
                raise WeightsError(f"{self._listing}: tensor {name} is missing; it must have shape {list(shape)}")
            place = self._places[name]
            if place.shape != shape:
                found = f"{place.file.name}: tensor {name} has shape {list(place.shape)}"
                raise WeightsError(f"{found}, the model needs {list(shape)}")
        if extra := sorted(self._places.keys() - shapes.keys() - ignored):
            file = self._places[extra[0]].file.name
            raise WeightsError(f"{file}: tensor {extra[0]} ({len(extra)} in all) has no place in the model")

    def check_head(self, *, tied: bool) -> bool:
        """Whether a tied model's files hold its embedding also as a head. Raises WeightsError for another head, which
        nothing would read."""
        if not (tied and HEAD in self._places and EMBEDDING in self._places):
            return False
        rows = min(1024, *(self._places[name].shape[0] for name in (HEAD, EMBEDDING)))
        if not torch.equal(self.read(HEAD, 0, 0, rows), self.read(EMBEDDING, 0, 0, rows)):
            told = f"tie_word_embeddings = true, but {HEAD} differs from {EMBEDDING}; set it to false, or leave it out"
            raise WeightsError(f"{self._listing}: config.json says {told}")
        return True

    def dtype(self, name: str) -> torch.dtype:
        return self._places[name].dtype

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """The tensor narrowed to [start, stop) along `dim` (0 or 1), on the CPU, contiguous, no view of the file. Whole
        rows are read."""
        place = self._places[name]
        first, last = (start, stop) if dim == 0 else (0, place.shape[0])
        rows = torch.empty((last - first, *place.shape[1:]), dtype=place.dtype)
        place.fill(rows, first * math.prod(place.shape[1:]) * place.dtype.itemsize)
        return rows if dim == 0 else rows[:, start:stop].contiguous()


def _listed(folder: Path) -> tuple[Path, list[Path]]:
    """What names the files of weights, and the files."""
    index = folder / INDEX_FILE
    if not index.exists():
        return folder / SINGLE_FILE, [folder / SINGLE_FILE]
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return index, [folder / name for name in sorted(set(names))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is damaged ({error!r})") from error


def _places(file: BinaryIO) -> dict[str, TensorPlace]:
    """Of a file whose header is sound."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            found, plain = entry["dtype"], ", ".join(DTYPES)
            raise WeightsError(f"{file.name}: tensor {name} has type {found}, as quantized weights have; give {plain}")
        start = _LENGTH_BYTES + length + entry["data_offsets"][0]
        places[name] = TensorPlace(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
    return places


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class FolderPlan:
    """Which file each tensor goes to, filled in the given order up to `max_bytes` (a larger tensor has one alone).

    Fixed before anything is written, so that any process can put any tensor in its place, in any order. `dtype`: of
    tensors that are not quantized (actor.weights.quantize).
    """

    def __init__(self, *, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int) -> None:
        self.shapes, self.dtype, self.total_bytes = shapes, dtype, 0
        self.headers: dict[str, bytes] = {}
        """By file: length and JSON, filled up with spaces so that the tensors start aligned."""
        self.places: dict[str, tuple[str, int]] = {}
        """By tensor: its file, and where in it the tensor's bytes begin."""
        parts: list[dict[str, Any]] = []
        end = 0
        for name, shape in shapes.items():
            stored = stored_dtype(name, shapes, dtype)
            size = math.prod(shape) * stored.itemsize
            if not parts or end + size > max_bytes:
                parts.append({})
                end = 0
            parts[-1][name] = {"dtype": _NAME_OF[stored], "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
            self.total_bytes += size
        for number, part in enumerate(parts, start=1):
            file = SINGLE_FILE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            text = json.dumps({"__metadata__": {"format": "pt"}, **part}, separators=(",", ":")).encode()
            text += b" " * (-len(text) % _ALIGNMENT)
            header = self.headers[file] = len(text).to_bytes(_LENGTH_BYTES, "little") + text
            self.places |= {name: (file, len(header) + entry["data_offsets"][0]) for name, entry in part.items()}

    def create(self, folder: Path) -> None:
        """An empty folder with every file's header, and the index where there are several."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, header in self.headers.items():
            (folder / file).write_bytes(header)
        if len(self.headers) > 1:
            file_of = {name: file for name, (file, _) in self.places.items()}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": file_of}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, folder: Path, name: str, tensor: Tensor) -> None:
        """Put one tensor, which is on the CPU, in its place in a folder that `create` made."""
        if tuple(tensor.shape) != self.shapes[name] or tensor.dtype != stored_dtype(name, self.shapes, self.dtype):
            raise WeightsError(f"{folder}: {name} is planned as {self.shapes[name]}, got {tensor.shape, tensor.dtype}")
        (file, offset), source = self.places[name], bytes_of(tensor.contiguous())
        with (folder / file).open("r+b", buffering=0) as stream:
            while source:
                count = os.pwrite(stream.fileno(), source[:PIECE_BYTES], offset)
                source, offset = source[count:], offset + count

    def finish(
        self, partial: Path, folder: Path, companions: Path, quantization: Mapping[str, Any] | None = None
    ) -> None:
        """Copy config and tokenizer from the folder `companions`, put `partial` in the place of `folder`.

        A folder that is already there is replaced; its readers keep what they have open. The config's `dtype` becomes
        that of the weights, and with `quantization` it says so.
        """
        copy_companions(companions, partial)
        _set_types(partial / "config.json", self.dtype, quantization)
        replace_folder(partial, folder)


def partial_folder(folder: Path) -> Path:
    """Where `folder` is written before it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def copy_companions(source: Path, target: Path) -> None:
    """Copy config, generation config and tokenizer."""
    for file in source.iterdir():
        if file.suffix in COMPANION_SUFFIXES and not file.name.endswith(".index.json") and file.is_file():
            shutil.copyfile(file, target / file.name)


def _set_types(config_file: Path, dtype: torch.dtype, quantization: Mapping[str, Any] | None) -> None:
    fields, name = json.loads(config_file.read_text()), str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in fields] or ["torch_dtype"]
    fields |= dict.fromkeys(keys, name) | ({"quantization_config": dict(quantization)} if quantization else {})
    config_file.write_text(json.dumps(fields, indent=2) + "\n")
