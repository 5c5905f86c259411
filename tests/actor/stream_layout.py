"""How a packed stream is padded and cut over context-parallel ranks: written a second time, as a reference of tests."""

from collections.abc import Sequence

import torch


def padded_lengths(lengths: Sequence[int], *, context_parallel: int, tensor_parallel: int, least: int = 0) -> list[int]:
    """Lengths with the padding that a layout needs.

    Context parallelism cuts each sequence into 2*CP equal chunks; sequence parallelism cuts a rank's stream into TP
    parts, for which the last sequence is padded further, and up to `least` tokens of all. (padded_lengths([5, 6],
    context_parallel=2, tensor_parallel=2) is [8, 8].)
    """
    chunks = 2 * context_parallel if context_parallel > 1 else 1
    padded = [_round_up(length, chunks) for length in lengths]
    total = sum(padded)
    padded[-1] += max(_round_up(total, chunks * tensor_parallel), least) - total
    return padded


def local_rows(padded_lengths: Sequence[int], *, context_parallel: int, context_rank: int) -> torch.Tensor:
    """[t] rows of the whole stream [T] that this context-parallel rank holds, in its order."""
    rows, start = [], 0
    for length in padded_lengths:
        rows.append(start + _local_positions(length, context_parallel, context_rank))
        start += length
    return torch.cat(rows)


def _local_positions(length: int, context_parallel: int, context_rank: int) -> torch.Tensor:
    if context_parallel == 1:
        return torch.arange(length)
    chunks = torch.arange(length).view(2 * context_parallel, -1)
    return torch.cat([chunks[context_rank], chunks[2 * context_parallel - 1 - context_rank]])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
