"""Which bytes of one file are those of another: whole rows of a parameter are copied from file to file, no tensor made.

A parameter in a checkpoint has the rows of Hugging Face tensors, in runs: each tensor's one after the other, or of each
key/value head its queries, key and value.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dapo.actor.weights.hf_files import PIECE_BYTES
from megatron_dapo.actor.weights.shards import Fused, Shards

COPIED_BYTES = 16 * PIECE_BYTES
"""Copied at a time: the progress counts them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a Hugging Face tensor that follow each other in a parameter too."""

    name: str
    start: int
    rows: int


def runs_of(shards: Shards, start: int, stop: int) -> Iterator[Run]:
    """Rows [start, stop) of the parameter as the checkpoint has it; rows that only pad the vocabulary are none."""
    begin = 0
    for run in _all_runs(shards):
        first, last = max(start, begin), min(stop, begin + run.rows)
        if first < last:
            yield Run(run.name, run.start + first - begin, last - first)
        begin += run.rows


def row_elements(shape: tuple[int, ...]) -> int:
    """Numbers in a row."""
    return math.prod(shape[1:])


def copy_bytes(source: int, source_offset: int, target: int, target_offset: int, count: int) -> Iterator[int]:
    """From file to file inside the kernel, as `shutil.copy` does; yields the bytes of each piece that is done.

    Raises:
        OSError: also where `source` ends before.
    """
    os.lseek(target, target_offset, os.SEEK_SET)
    end = source_offset + count
    while source_offset < end:
        done = os.sendfile(target, source, source_offset, min(COPIED_BYTES, end - source_offset))
        if done == 0:
            raise OSError(f"{count} bytes were asked for, {end - source_offset} of them lie behind the file's end")
        source_offset += done
        yield done


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """Columns of a parameter's rows, one row after the other in an open file. All in bytes."""

    file: int
    offset: int
    """Of the first row in the file."""

    begin: int
    """Of the strip in a whole row."""

    width: int


def copy_rows(strips: Sequence[Strip], row: int, rows: int, target: int, target_offset: int) -> Iterator[int]:
    """Rows [row, row + rows) of strips that lie side by side, whole, to the file `target`; yields the bytes of each
    piece that is done.

    Raises:
        OSError: also where a source ends before.
    """
    width = sum(strip.width for strip in strips)
    if len(strips) == 1:
        yield from copy_bytes(strips[0].file, strips[0].offset + row * width, target, target_offset, rows * width)
        return
    at_once = max(1, PIECE_BYTES // width)
    whole: Any = np.empty((at_once, width), np.uint8)
    parts: list[Any] = [np.empty((at_once, strip.width), np.uint8) for strip in strips]
    for first in range(row, row + rows, at_once):
        count = min(at_once, row + rows - first)
        for strip, part in zip(strips, parts, strict=True):
            _fill(memoryview(part[:count]).cast("B"), strip.file, strip.offset + first * strip.width)
            whole[:count, strip.begin : strip.begin + strip.width] = part[:count]
        piece = memoryview(whole[:count]).cast("B")
        while piece:
            written = os.pwrite(target, piece, target_offset)
            yield written
            piece, target_offset = piece[written:], target_offset + written


def _fill(memory: memoryview, file: int, offset: int) -> None:
    while memory:
        count = os.preadv(file, [memory], offset)
        if count == 0:
            raise OSError(f"{len(memory)} of the bytes that were asked for lie behind the file's end")
        memory, offset = memory[count:], offset + count


def _all_runs(shards: Shards) -> Iterator[Run]:
    groups = (shards.groups or 1) if isinstance(shards, Fused) else 1
    rows = {name: shape[0] // groups for name, shape in shards.shapes.items()}
    for group in range(groups):
        for name, count in rows.items():
            yield Run(name, group * count, count)
