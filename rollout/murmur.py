"""Steps of MurmurHash3 on int32 tensors, whose products and sums wrap as the hash's unsigned ones do."""

import torch
from torch import Tensor


def signed(pattern: int) -> int:
    """The int32 with these 32 bits."""
    return pattern - (1 << 32) if pattern >= 1 << 31 else pattern


def shift_right(value: Tensor, bits: int) -> Tensor:
    """Fills up with zeros; int32's own shift fills up with the sign."""
    return (value >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def rotate(value: Tensor, bits: int) -> Tensor:
    return (value << bits).bitwise_or_(shift_right(value, 32 - bits))


def fmix32(value: Tensor) -> Tensor:
    """The hash's last mixing, in place; `value` is contiguous."""
    halves = value.view(torch.int16)  # of little-endian words: a shift by 16 that moves nothing
    low, high = halves[..., ::2], halves[..., 1::2]
    low ^= high
    value *= signed(0x85EBCA6B)
    value ^= shift_right(value, 13)
    value *= signed(0xC2B2AE35)
    low ^= high
    return value
