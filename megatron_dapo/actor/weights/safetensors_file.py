"""Safetensors files by positioned reads and writes: only the bytes asked for are ever in memory.

A file is 8 bytes with the header's length, the header (JSON: type, shape and place of each tensor), and the tensors'
bytes. The library's own reader maps the whole file: what has been read of it then counts to the process's memory until
the file is closed. Its writer wants all tensors of a file at once.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNMENT = 8
PIECE_BYTES = 2**20
"""Written at a time: Linux takes a few of these faster than one large write."""
WHOLE_ROW_BYTES = 2**15
"""Rows up to this size are read whole where only some columns are wanted: a read for each row costs more."""


class WeightsError(ValueError):
    """Weights that do not fit the model; the message names the tensor and the file."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of a file; `start` and `stop` are bytes from the file's beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One open file. The header is checked against the file's size: a cut file is refused with a tensor's name."""

    def __init__(self, file: Path) -> None:
        self.file = Path(file)
        self._descriptor = os.open(self.file, os.O_RDONLY)
        try:
            self.places = _places(self.file, self._descriptor)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """The tensor narrowed to [start, stop) along `dim` (0 or 1), on the CPU, contiguous, no view of the file."""
        place = self.places[name]
        shape = list(place.shape)
        width = math.prod(shape[1:]) * place.dtype.itemsize
        rows = shape[0]
        shape[dim] = stop - start
        tensor = torch.empty(shape, dtype=place.dtype)
        if dim == 0 or stop - start == place.shape[1]:
            first = start * width if dim == 0 else 0
            self._fill(bytes_of(tensor), place.start + first, name)
            return tensor
        target, done = bytes_of(tensor), 0
        for piece in self._packed_columns(place, name, (0, rows), (start, stop)):
            target[done : done + len(piece)] = piece
            done += len(piece)
        return tensor

    def pieces(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> Iterator[memoryview]:
        """The bytes of rows [start, stop), of them only the columns [begin, end) where `columns` says so; PIECE_BYTES
        at a time, in memory that the next piece takes again: what is done with a piece finds it in the processor's
        cache."""
        place = self.places[name]
        if columns is not None and columns != (0, place.shape[1]):
            yield from self._packed_columns(place, name, (start, stop), columns)
            return
        width = math.prod(place.shape[1:]) * place.dtype.itemsize
        offset, end = place.start + start * width, place.start + stop * width
        memory = memoryview(bytearray(min(PIECE_BYTES, end - offset)))
        while offset < end:
            piece = memory[: end - offset]
            self._fill(piece, offset, name)
            yield piece
            offset += len(piece)

    def _packed_columns(
        self, place: TensorPlace, name: str, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Iterator[memoryview]:
        """Part of a matrix row by row, without gaps; the memory is taken again as in `pieces`."""
        step = place.dtype.itemsize
        width, begin, part = place.shape[1] * step, columns[0] * step, (columns[1] - columns[0]) * step
        if part == 0:
            return
        at_once = max(1, PIECE_BYTES // width)
        packed: Any = np.empty((at_once, part), np.uint8)
        whole: Any = np.empty((at_once, width), np.uint8) if width <= WHOLE_ROW_BYTES else None
        for row in range(rows[0], rows[1], at_once):
            count = min(at_once, rows[1] - row)
            offset = place.start + row * width
            if whole is not None:
                self._fill(memoryview(whole[:count]).cast("B"), offset, name)
                packed[:count] = whole[:count, begin : begin + part]
            else:
                for number in range(count):
                    self._fill(memoryview(packed[number]), offset + number * width + begin, name)
            yield memoryview(packed[:count]).cast("B")

    def _fill(self, target: memoryview, offset: int, name: str) -> None:
        while target:
            count = os.preadv(self._descriptor, [target], offset)
            if count == 0:
                raise WeightsError(f"{self.file}: tensor {name} ends with the file, which became shorter meanwhile")
            target, offset = target[count:], offset + count


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """A file that is written tensor by tensor, in any order, by any process."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @cached_property
    def header(self) -> bytes:
        """Length and JSON, filled up with spaces so that the tensors start aligned."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in self.shapes.items():
            start, end = end, end + math.prod(shape) * self.dtype.itemsize
            header[name] = {"dtype": _NAME_OF[self.dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    @cached_property
    def starts(self) -> dict[str, int]:
        """Where each tensor's bytes begin in the file."""
        places, start = {}, len(self.header)
        for name, shape in self.shapes.items():
            places[name] = start
            start += math.prod(shape) * self.dtype.itemsize
        return places

    @property
    def total_bytes(self) -> int:
        """Of the tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values()) * self.dtype.itemsize

    def create(self, file: Path) -> None:
        """The header, and room for the tensors."""
        with file.open("wb") as stream:
            stream.write(self.header)
            stream.truncate(len(self.header) + self.total_bytes)

    def write(self, file: Path, name: str, tensor: Tensor) -> None:
        """Put one tensor in its place in a file that `create` made."""
        if tuple(tensor.shape) != self.shapes[name] or tensor.dtype != self.dtype:
            raise WeightsError(
                f"{file}: {name} is planned as {list(self.shapes[name])} of {self.dtype}, got {list(tensor.shape)} of "
                f"{tensor.dtype}"
            )
        source, offset = bytes_of(tensor.contiguous()), self.starts[name]
        with file.open("r+b", buffering=0) as stream:
            while source:
                count = os.pwrite(stream.fileno(), source[:PIECE_BYTES], offset)
                source, offset = source[count:], offset + count


def _places(file: Path, descriptor: int) -> dict[str, TensorPlace]:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    begin = _LENGTH_BYTES + length
    if begin > size:
        raise WeightsError(f"{file}: {size} bytes, shorter than its own header; it is cut, or no safetensors file")
    try:
        header = json.loads(os.pread(descriptor, length, _LENGTH_BYTES))
        header.pop("__metadata__", None)
        entries = {
            name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file}: its header is damaged ({error!r})") from error
    for name, (_, shape, *offsets) in entries.items():
        if len(offsets) != 2 or not all(isinstance(size, int) and size >= 0 for size in (*shape, *offsets)):
            raise WeightsError(f"{file}: its header is damaged: tensor {name} has shape {list(shape)} at {offsets}")
    places, taken = {}, 0
    for name, (kind, shape, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if kind not in DTYPES:
            raise WeightsError(f"{file}: tensor {name} has type {kind}; known: {', '.join(DTYPES)}")
        place = TensorPlace(DTYPES[kind], shape, begin + start, begin + stop)
        if place.stop > size:
            raise WeightsError(
                f"{file}: tensor {name} ends at byte {place.stop}, the file at {size}: it is cut; fetch it again"
            )
        if stop - start != math.prod(shape) * place.dtype.itemsize:
            raise WeightsError(f"{file}: tensor {name} has {stop - start} bytes, its shape {list(shape)} needs others")
        if start < taken:
            raise WeightsError(f"{file}: its header is damaged: tensor {name} begins inside the one before it")
        taken = stop
        places[name] = place
    return places


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
