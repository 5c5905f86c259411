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


def nothing_to_do(*args: object, **kwargs: object) -> None:
    """In place of what is for GPUs alone, as `enable_batch_invariant_mode`, which installs Triton kernels."""


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """SGLang's Triton kernel of this name: the 32-bit murmur hash of seed, position, token.

    It is drawn for every token of the vocabulary, so it is a cost of each response token: int32, which wraps as the
    hash wants it, takes a quarter of the time that int64 with masks takes.

    Args:
        seed: [n] uint64 or int64, `sampling_seed` of each request.
        positions: [n] position of the token to draw.
        col_indices: [m] token ids.

    Returns:
        [n, m] int64 in 0 .. 2**32 - 1; the sampler's noise is made of it.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    state = torch.zeros_like(seed, dtype=torch.int32)
    for block in (_low(seed), _low(seed >> 32), _low(positions)):
        state = _mix(state, block)
    state = _mix(state[:, None], _low(col_indices)[None, :])
    state ^= 16  # length in bytes: seed 8, position 4, token 4
    state ^= _right(state, 16)
    state *= _signed(0x85EBCA6B)
    state ^= _right(state, 13)
    state *= _signed(0xC2B2AE35)
    state ^= _right(state, 16)
    return state.to(torch.int64).bitwise_and_(0xFFFFFFFF)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    block = _rotate(block * _signed(0xCC9E2D51), 15) * _signed(0x1B873593)
    return _rotate(state ^ block, 13).mul_(5).add_(_signed(0xE6546B64))


def _rotate(value: Tensor, bits: int) -> Tensor:
    return (value << bits).bitwise_or_(_right(value, 32 - bits))


def _right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: int32's own fills up with the sign."""
    return (value >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _low(value: Tensor) -> Tensor:
    """The low 32 bits as int32."""
    low = value.to(torch.int64) & 0xFFFFFFFF
    return torch.where(low > 0x7FFFFFFF, low - (1 << 32), low).to(torch.int32)


def _signed(factor: int) -> int:
    """The int32 with these 32 bits."""
    return factor - (1 << 32) if factor > 0x7FFFFFFF else factor


def linear_in_full_rows(apply: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Any = None) -> Tensor:
    """Around `UnquantizedLinearMethod.apply`: x [T, in] is padded to `ROWS` rows."""
    return apply(method, layer, _padded(x), bias)[: x.shape[0]]


def head_in_full_rows(head: Callable[..., Tensor], processor: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Around `LogitsProcessor._compute_lm_head`: hidden [T, width] is padded to `ROWS` rows."""
    return head(processor, _padded(hidden), *args, **kwargs)[: hidden.shape[0]]


def _padded(x: Tensor) -> Tensor:
    missing = ROWS - x.shape[0]
    return pad(x, (0, 0, 0, missing)) if x.dim() == 2 and missing > 0 else x
