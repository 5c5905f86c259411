"""The endless prompt order: which prompt stands at which position. Depends on the seed and the data alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, odd: its multiples modulo 2^64 are spread as evenly as any sequence's."""

_LEAST = 1 << 14
"""Positions whose files are drawn at once."""

_KEPT = 1024
"""Epochs of files in memory: an odd one needs three a file, and a mixture may have hundreds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The prompts of one file among all prompts, and its weight. Span(start=0, count=7473, weight=2)."""

    start: int
    count: int
    weight: float


class PromptOrder:
    """Order over one or several files: every file is gone through epoch after epoch, each a permutation of its own, and
    each position goes to one file. `spaced`: between two uses of a prompt lies more than a quarter of its file, so that
    a batch around an epoch's end holds none twice.

    The position decides by a low-discrepancy sequence, so that any stretch of positions, not only a long one, holds
    the files nearly as the weights say: after p positions a file with share w has had w p of them, give or take a few.
    """

    def __init__(self, spans: Sequence[Span], seed: int, *, spaced: bool = True) -> None:
        self._spans, self._seed, self._epoch = tuple(spans), seed, _spaced if spaced else _drawn
        shares = np.array([span.weight for span in spans], dtype=np.float64)
        shares /= shares.max()  # else the sum of very large ones would be infinite
        self._bounds = np.cumsum(shares / shares.sum())[:-1]
        self._start = np.uint64(np.random.Generator(np.random.PCG64([seed, len(spans)])).integers(1 << 63))
        self._files = self._times = np.zeros(0, np.int64)
        """File of each position so far, and how often that file was drawn before: 16 bytes a position."""

    def index_at(self, position: int) -> int:
        """Index, among all prompts, of the prompt at `position`."""
        if position >= len(self._files):
            self._draw(max(_LEAST, 2 * position))
        file, times = int(self._files[position]), int(self._times[position])
        span = self._spans[file]
        epoch, at = divmod(times, span.count)
        return span.start + int(self._epoch(span.count, self._seed, epoch, file)[at])

    def _draw(self, positions: int) -> None:
        """The files of the first so many positions."""
        even = (np.arange(positions, dtype=np.uint64) * np.uint64(_GOLDEN) + self._start).astype(np.float64) / 2.0**64
        self._files = np.searchsorted(self._bounds, even, side="right")
        by_file, counts = np.argsort(self._files, kind="stable"), np.bincount(self._files)
        self._times = np.empty(positions, np.int64)
        self._times[by_file] = np.arange(positions) - np.repeat(np.cumsum(counts) - counts, counts)


@lru_cache(maxsize=_KEPT)
def _spaced(count: int, seed: int, epoch: int, file: int) -> np.ndarray:
    """The order of a file's prompts in an epoch. Even epochs are as drawn; an odd one begins with none of the last
    quarter before it and ends with none of the first quarter after it."""
    drawn = _drawn(count, seed, epoch, file)
    if epoch % 2 == 0:
        return drawn
    quarter = count // 4
    before, after = (_drawn(count, seed, neighbor, file) for neighbor in (epoch - 1, epoch + 1))
    first = drawn[~np.isin(drawn, before[count - quarter :])][:quarter]
    rest = drawn[~np.isin(drawn, first)]
    may_end = rest[~np.isin(rest, after[:quarter])]
    last = may_end[len(may_end) - quarter :]
    return np.concatenate([first, rest[~np.isin(rest, last)], last])


@lru_cache(maxsize=_KEPT)
def _drawn(count: int, seed: int, epoch: int, file: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch, file] if file else [seed, epoch])).permutation(count)
