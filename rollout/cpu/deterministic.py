"""What SGLang's deterministic inference needs on a CPU: a seeded sampler's hash, and matmuls that ignore the batch.

On a GPU SGLang brings Triton kernels for both. Attention is made batch-invariant by `attention.padded_keys`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

ROWS = 16
"""With fewer rows the matmul library uses other kernels, and a row gets other last bits. From 16 rows on the result
of a row did not depend on the number of rows, in float32 with one thread, up to the 4096 rows that were tried."""

_LOW = 0xFFFFFFFF


def no_gpu_kernels(*args: object, **kwargs: object) -> None:
    """In place of `enable_batch_invariant_mode`, which replaces PyTorch's operators on a GPU by Triton kernels."""


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """SGLang's Triton kernel of this name in int64 arithmetic: the 32-bit murmur hash of seed, position, token.

    Args:
        seed: [n] uint64 or int64, `sampling_seed` of each request.
        positions: [n] position of the token to draw.
        col_indices: [m] token ids.

    Returns:
        [n, m] int64 in 0 .. 2**32 - 1; the sampler's noise is made of it.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed & _LOW, (seed >> 32) & _LOW, positions.to(torch.int64) & _LOW):
        state = _mix(state, block)
    state = _mix(state[:, None], (col_indices.to(torch.int64) & _LOW)[None, :])
    state = state ^ 16  # length in bytes: seed 8, position 4, token 4
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    block = _times(_rotate(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _LOW


def _rotate(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _LOW


def _times(value: Tensor, factor: int) -> Tensor:
    """(value * factor) mod 2**32 without leaving the signed 64-bit range: by halves of 16 bits."""
    return ((value & 0xFFFF) * factor + ((((value >> 16) * factor) & 0xFFFF) << 16)) & _LOW


def linear_in_full_rows(apply: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Any = None) -> Tensor:
    """Around `UnquantizedLinearMethod.apply`: x [T, in] is padded to `ROWS` rows."""
    return apply(method, layer, _padded(x), bias)[: x.shape[0]]


def head_in_full_rows(head: Callable[..., Tensor], processor: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Around `LogitsProcessor._compute_lm_head`: hidden [T, width] is padded to `ROWS` rows."""
    return head(processor, _padded(hidden), *args, **kwargs)[: hidden.shape[0]]


def _padded(x: Tensor) -> Tensor:
    missing = ROWS - x.shape[0]
    return pad(x, (0, 0, 0, missing)) if x.dim() == 2 and missing > 0 else x
