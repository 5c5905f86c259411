"""The reference policy of the KL term: the weights that the run began with, kept on the host and swapped in."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module

from megatron_dapo.actor.offload import to_host


class ReferenceWeights:
    """A copy of a rank's own shard of the weights, in host memory; as large as the shard."""

    def __init__(self, chunks: Sequence[Module]) -> None:
        """Copy the weights that `chunks` hold now."""
        self._chunks = chunks
        self._weights = self._copy()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The chunks hold the reference's weights inside, and their own again, bit for bit, afterwards."""
        own = self._copy()
        self._set(self._weights)
        try:
            yield
        finally:
            self._set(own)

    def _parameters(self) -> list[Tensor]:
        return [parameter for chunk in self._chunks for parameter in chunk.parameters()]

    def _copy(self) -> list[Tensor]:
        return [to_host(parameter) for parameter in self._parameters()]

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor]) -> None:
        # In place: the optimizer's and the gradient buffers' views of the parameters must stay valid.
        for parameter, weight in zip(self._parameters(), weights, strict=True):
            parameter.copy_(weight)
