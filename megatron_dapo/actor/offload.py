"""The actor's tensors moved to host memory and back: between phases, and the optimizer's outside its step.

A tensor stays the same object: only its storage is emptied and later filled again, so every view (Megatron's flat
buffers, their parts in parameters, master weights and gradients) is valid afterwards, bit for bit. While a part is
away its tensors must not be touched: they have no memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Module

from megatron_dapo.config.actor_config import OffloadConfig

Part = Literal["parameters", "gradients", "optimizer"]
"""`parameters`: the weights of forward and backward; `gradients`: their buffers; `optimizer`: moments and master
weights."""

PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")

PIECE_BYTES = 2**28
"""Of a host copy: PyTorch rounds each pinned allocation up to a power of two, which would double a large one."""

STAGING_BYTES = 2**25
"""Of the pinned buffer of `to_pageable`: the bus needs less for its full speed."""


def parts_at_rest(config: OffloadConfig) -> tuple[Part, ...]:
    """What is in host memory while the actor has nothing to do."""
    if config.between_phases == "all":
        return PARTS
    if config.between_phases == "optimizer":
        return ("gradients", "optimizer")
    return ("optimizer",) if config.optimizer_state else ()


class DeviceMemory:
    """Which parts of a rank's actor are on its device. All parts are at the start."""

    def __init__(self, chunks: Iterable[torch.nn.Module], megatron_optimizer: Any) -> None:
        """`chunks`: in Megatron's DistributedDataParallel; `megatron_optimizer`: a ChainedOptimizer over them."""
        self._chunks: list[Any] = list(chunks)
        self._megatron = megatron_optimizer
        self._away: dict[Part, list[tuple[UntypedStorage, int]]] = {}
        """With the bytes that each storage had."""
        self._host: dict[Part, dict[int, list[Tensor]]] = {part: {} for part in PARTS}

    def storages(self) -> frozenset[int]:
        """Addresses of the storages that training changes: of weights, buffers, moments and master weights."""
        # The wrapper itself has a list of that name.
        buffers = (buffer for chunk in self._chunks for buffer in chunk.get_submodule("module").buffers())
        return frozenset(_storages([*self._parameters(), *buffers, *self._optimizer_tensors()]))

    def offload(self, *parts: Part, give_back: bool = True) -> None:
        """Free the device memory of `parts`; what is away already stays away.

        Weights, moments and master weights go to the host, pinned where the device is CUDA; gradients are dropped and
        come back as zeros. The host copies' memory is kept for the next time. `give_back`: so that another process on
        this GPU can have the device memory; without it PyTorch keeps it for this one.
        """
        for part in parts:
            if part not in self._away:
                self._release(part)
        if parts and give_back and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def onload(self, *parts: Part) -> None:
        """Bring `parts` back to the device; what is there already stays."""
        for part in parts:
            host = self._host[part]
            for storage, size in self._away.pop(part, []):
                storage.resize_(size)
                kept = host.get(storage._cdata)
                if kept is None:
                    _bytes_of(storage).zero_()
                else:
                    for target, piece in zip(_pieces(storage), kept, strict=True):
                        target.copy_(piece, non_blocking=True)

    @contextmanager
    def resident(self, *parts: Part, give_back: bool = True) -> Iterator[None]:
        """`parts` are on the device inside; afterwards those that were away are away again."""
        brought = [part for part in parts if part in self._away]
        self.onload(*brought)
        try:
            yield
        finally:
            self.offload(*brought, give_back=give_back)

    def _release(self, part: Part) -> None:
        storages = _storages(self._parameters())
        if part == "parameters":
            # TransformerEngine's layers keep their weights in FP8, and make them anew when they find none.
            for module in (module for chunk in self._chunks for module in chunk.modules()):
                vars(module).get("_fp8_workspaces", {}).clear()
        else:
            device = next(self._parameters()).device
            # Those of a step on the CPU are never on the device.
            tensors = (tensor for tensor in self._optimizer_tensors() if tensor.device == device)
            if part == "gradients":
                # Master weights keep views of the gradient buffers until the next step.
                self._megatron.zero_grad()
                tensors = (each.main_grad for chunk in self._chunks for each in chunk.params_with_grad)
            # Without low-precision weights the master weights are the weights themselves.
            storages = {key: storage for key, storage in _storages(tensors).items() if key not in storages}
        if part != "gradients":
            # Only what is still there: a loaded checkpoint replaces the optimizer's tensors.
            self._host[part] = {key: _copied(each, self._host[part].get(key)) for key, each in storages.items()}
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        self._away[part] = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)

    def _parameters(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from chunk.parameters()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for optimizer in self._megatron.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned if `tensor` is on CUDA: only such memory is copied at the bus's full speed."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor.detach())


def to_pageable(tensor: Tensor) -> Tensor:
    """`tensor` in memory that is not pinned, for what is large and soon gone: itself if it is on the host, or else a
    contiguous copy, through one pinned buffer that stays. One thread at a time.

    The bus fills the buffer in a fraction of the time in which the host empties it: a second one would gain little.
    """
    if not tensor.is_cuda:
        return tensor.detach()
    source = tensor.detach().contiguous()
    copied = torch.empty_like(source, device="cpu")
    pieces = (each.view(-1).view(torch.uint8).split(STAGING_BYTES) for each in (copied, source))
    for target, piece in zip(*pieces, strict=True):
        target.copy_(_staging()[: len(piece)].copy_(piece))
    return copied


@cache
def _staging() -> Tensor:
    return torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Those of the tensors, by address."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pieces(storage: UntypedStorage) -> tuple[Tensor, ...]:
    return _bytes_of(storage).split(PIECE_BYTES)


def _copied(storage: UntypedStorage, host: list[Tensor] | None) -> list[Tensor]:
    """The storage's bytes in `host`, or in new memory."""
    pieces = _pieces(storage)
    if host is None or [len(piece) for piece in host] != [len(piece) for piece in pieces]:
        return [to_host(piece) for piece in pieces]
    return [kept.copy_(piece, non_blocking=True) for kept, piece in zip(host, pieces, strict=True)]


class ReferenceWeights:
    """The reference policy of the KL term: weights of a rank's own shard, in host memory."""

    def __init__(self, chunks: Sequence[Module]) -> None:
        """`chunks`: whose present weights it begins with."""
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self.take()

    def take(self) -> None:
        """Copy the weights that the chunks hold now."""
        self._weights = [to_host(parameter) for parameter in self._parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The chunks hold the reference's weights inside, and their own again, bit for bit, afterwards."""
        own = [to_host(parameter) for parameter in self._parameters]
        self._set(self._weights)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, weights: Sequence[Tensor]) -> None:
        # In place: the optimizer's and the gradient buffers' views of the parameters must stay valid.
        for parameter, weight in zip(self._parameters, weights, strict=True):
            parameter.copy_(weight)
