"""Which memory a tensor uses, and which storages belong together."""

from collections.abc import Sequence
from typing import Any

import torch


class Storages:
    """A set of storages; one that is freed is forgotten before its address is used again."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        # A weak reference keeps the address from being given to another storage.
        self._kept[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage)
        if len(self._kept) > 2000 and len(self._kept) % 1000 == 0:
            self._kept = {key: kept for key, kept in self._kept.items() if not kept.expired()}

    def discard(self, tensor: torch.Tensor) -> None:
        self._kept.pop(tensor.untyped_storage()._cdata, None)

    def clear(self) -> None:
        self._kept.clear()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return bool(self._kept) and tensor.untyped_storage()._cdata in self._kept


def meets(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Whether the tensor's bytes overlap those of one of `others`."""
    if not others or tensor.numel() == 0:
        return False
    storage, (start, end) = tensor.untyped_storage()._cdata, _span(tensor)
    for other in others:
        if other.untyped_storage()._cdata == storage:
            other_start, other_end = _span(other)
            if start < other_end and other_start < end:
                return True
    return False


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    first = tensor.storage_offset()
    extent = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (first + extent + 1) * size
