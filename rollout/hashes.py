"""The hash that SGLang's weight checker reports of a tensor, computed here: one on a CPU, another one on a GPU."""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Hash = Callable[[Tensor], str]

_TILE_WORDS = 8192
_WORD = np.uint32
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))
_CHUNK_TILES = 512  # 16 MiB at a time


def hash_for(device: str) -> Hash:
    """The hash that a server on `device` ("cpu" or "cuda") reports: 16 hex digits of the tensor's bytes in order."""
    return cpu_hash if device == "cpu" else cuda_hash


def cpu_hash(tensor: Tensor) -> str:
    """First 8 bytes of the SHA-256 of the contiguous bytes."""
    return hashlib.sha256(_bytes(tensor).data).digest()[:8].hex()


def cuda_hash(tensor: Tensor) -> str:
    """SGLang's `gpu_tensor_hash`: a sum over the 32-bit words, each mixed with its position, tile by tile of 8192.

    Every word v at index i gives fmix32(v ^ (i * A + seed ^ rotate(i))) for two sets of constants; a tile's two sums
    are mixed again and joined to 64 bits, the tiles' 64-bit values are added, and splitmix64 ends it.
    """
    data = _bytes(tensor)
    words = np.pad(data, (0, -data.size % 4)).view(_WORD)
    if words.size == 0:
        return f"{0:016x}"
    total = 0
    for begin in range(0, words.size, _CHUNK_TILES * _TILE_WORDS):
        chunk = words[begin : begin + _CHUNK_TILES * _TILE_WORDS]
        index = np.arange(begin, begin + chunk.size, dtype=np.uint64).astype(_WORD)  # wraps as the kernel's does
        tiles = np.arange(0, chunk.size, _TILE_WORDS)
        halves = []
        for seed, (factor, rotation) in zip(_SEEDS, _POSITION, strict=True):
            position = (index * _WORD(factor) + _WORD(seed)) ^ _rotate(index, rotation)
            mixed = np.add.reduceat(_fmix32(chunk ^ position), tiles, dtype=_WORD)
            halves.append(_fmix32(mixed ^ _WORD(words.size * 4 & 0xFFFFFFFF)).astype(np.uint64))
        total += sum(int(value) for value in (halves[0] << np.uint64(32)) | halves[1])
    return f"{_splitmix64(total & _LOW64):016x}"


_LOW64 = (1 << 64) - 1


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _rotate(value: np.ndarray, bits: int) -> np.ndarray:
    return (value << _WORD(bits)) | (value >> _WORD(32 - bits))


def _fmix32(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> _WORD(16))) * _WORD(0x85EBCA6B)
    value = (value ^ (value >> _WORD(13))) * _WORD(0xC2B2AE35)
    return value ^ (value >> _WORD(16))


def _splitmix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LOW64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LOW64
    return value ^ (value >> 31)
