"""The hash of a tensor that SGLang's weight checker reports, computed here. It is `cpu_hash` for servers on a CPU and
`cuda_hash` for servers on a GPU; both give 16 hex digits.

A tensor comes as parts that follow each other along their first dimension. They are neither joined nor copied as a
whole, and are hashed on the device where they are.
"""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK_BYTES = 16 << 20
"""Bytes of a tensor that are processed at a time."""

_TILE_WORDS = 8192
_TILE_BYTES = 4 * _TILE_WORDS
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))
_LOW32 = (1 << 32) - 1
_LOW64 = (1 << 64) - 1


def cpu_hash(parts: Sequence[Tensor]) -> str:
    """First 8 bytes of the SHA-256 of the bytes."""
    digest = hashlib.sha256()
    for block in _blocks(parts):
        digest.update(block.cpu().numpy().data)
    return digest.digest()[:8].hex()


def cuda_hash(parts: Sequence[Tensor]) -> str:
    """SGLang's `gpu_tensor_hash`: a sum over the 32-bit words, each mixed with its position, tile by tile of 8192.

    Every word v at index i gives fmix32(v ^ (i * A + seed ^ rotate(i))) for two sets of constants; a tile's two sums
    are mixed again and joined to 64 bits, the tiles' 64-bit values are added, and splitmix64 is applied last. The words
    are int32 here, whose products and sums wrap as the kernel's unsigned ones do.
    """
    size = sum(part.numel() * part.element_size() for part in parts)
    size += -size % 4
    if size == 0:
        return f"{0:016x}"
    total, begin = 0, 0
    for run in _whole_tiles(parts):
        words = pad(run, (0, -run.numel() % 4)).view(torch.int32)
        index = torch.arange(begin, begin + words.numel(), device=words.device).to(torch.int32)
        halves = []
        for seed, (factor, rotation) in zip(_SEEDS, _POSITION, strict=True):
            position = (index * _signed(factor) + _signed(seed)) ^ _rotate(index, rotation)
            mixed = _fmix32(words ^ position)
            tiles = pad(mixed, (0, -mixed.numel() % _TILE_WORDS)).view(-1, _TILE_WORDS).sum(1, dtype=torch.int32)
            halves.append(_fmix32(tiles ^ _signed(size & _LOW32)).to(torch.int64))
        total += int(((halves[0] << 32) | (halves[1] & _LOW32)).sum())
        begin += words.numel()
    return f"{_splitmix64(total & _LOW64):016x}"


def _blocks(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bytes of the parts, uint8, some rows at a time; nothing is copied of rows that stand in order."""
    for part in parts:
        rows = part.detach().reshape(-1, 1) if part.dim() < 2 else part.detach()
        if rows.numel() == 0:
            continue
        bytes_a_row = rows.element_size() * rows[0].numel()
        for block in rows.split(max(1, BLOCK_BYTES // bytes_a_row)):
            yield block.contiguous().reshape(-1).view(torch.uint8)


def _whole_tiles(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same bytes in runs of whole tiles; the last run is what is left."""
    rest: list[Tensor] = []
    for block in _blocks(parts):
        rest.append(block)
        if sum(each.numel() for each in rest) < BLOCK_BYTES:
            continue
        joined = torch.cat(rest) if len(rest) > 1 else block
        whole = joined.numel() // _TILE_BYTES * _TILE_BYTES
        yield joined[:whole]
        rest = [joined[whole:]] if whole < joined.numel() else []
    if rest:
        yield torch.cat(rest)


def _signed(value: int) -> int:
    """A 32-bit pattern as int32 has it."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shift to the right that fills up with zeros, not with the sign."""
    return (value >> bits) & (_LOW32 >> bits)


def _rotate(value: Tensor, bits: int) -> Tensor:
    return (value << bits) | _shifted(value, 32 - bits)


def _fmix32(value: Tensor) -> Tensor:
    value = (value ^ _shifted(value, 16)) * _signed(0x85EBCA6B)
    value = (value ^ _shifted(value, 13)) * _signed(0xC2B2AE35)
    return value ^ _shifted(value, 16)


def _splitmix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LOW64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LOW64
    return value ^ (value >> 31)
