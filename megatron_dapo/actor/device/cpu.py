"""Megatron-Core on the CPU: what it asks of `torch.cuda` is answered, for Megatron's modules alone.

Every `megatron.*` module gets, once it is imported, a stand-in for its global `torch`: the same attributes, except
that `torch.cuda.current_device()` is the CPU, streams and events do nothing, the CUDA generator is the CPU's, and
factories take `device="cuda"` as the CPU. The real `torch`, and with it everything else in the process, stays as it
is. Only two tensor methods have to be replaced themselves, since no module's global reaches them; they ask who calls.
Packages of CUDA kernels that Megatron would prefer to PyTorch's are as if they were not installed.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")
CUDA_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")
RNG_MODULE = "megatron.core.tensor_parallel.random"


def install() -> None:
    """Answer Megatron's CUDA calls on the CPU from now on; once is enough for a process.

    Raises:
        RuntimeError: a Megatron module is already imported, so parts of it hold the real `torch`.
    """
    if any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return
    if early := [name for name in sys.modules if name == "megatron.core" or name.startswith("megatron.core.")]:
        raise RuntimeError(f"{early[0]} was imported before actor.device.prepare; call prepare first in this process")
    loaded = [name for name in sys.modules if name.partition(".")[0] in CUDA_PACKAGES]
    # Python's own way to say that a module cannot be found.
    sys.modules.update(dict.fromkeys([*CUDA_PACKAGES, *loaded]))  # type: ignore[arg-type]
    sys.meta_path.insert(0, _MegatronFinder(_stand_in_for_torch()))
    _patch_tensor_methods()
    # Megatron watches the CPU generator while it forks "the CUDA one"; here both are the same, by design.
    logging.getLogger(RNG_MODULE).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Lets the usual finder find `megatron.*` and gives each module the stand-in when its code has run."""

    def __init__(self, stand_in: ModuleType):
        self.stand_in = stand_in

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if path is None or name.partition(".")[0] != "megatron":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(self._exec_module, run)  # type: ignore[method-assign]
        return spec

    def _exec_module(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        run(module)
        if vars(module).get("torch") is torch:
            vars(module)["torch"] = self.stand_in
        if module.__name__ == RNG_MODULE:
            vars(module).update(_get_cuda_rng_state=_get_rng_state, _set_cuda_rng_state=_set_rng_state)
        elif module.__name__ == "megatron.core.transformer.moe.moe_utils":
            vars(module).setdefault("te_general_gemm", None)  # 0.16 names it also where it could not import it
        elif module.__name__ == "megatron.core.jit":
            module.disable_jit_fuser()  # torch.compile would call a C++ compiler for each small function


class _Stand(ModuleType):
    """A module's attributes with some of them replaced; one that appears later is still found."""

    def __init__(self, real: ModuleType, replaced: dict[str, Any]):
        super().__init__(real.__name__)
        vars(self).update({**vars(real), **replaced})
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _NoStream:
    """Stands for streams and events: all work on the CPU is done when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record_event(self, *args: Any) -> "_NoStream":
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _stand_in_for_torch() -> ModuleType:
    generator: dict[str, Any] = {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state}
    generator |= dict.fromkeys(("manual_seed", "manual_seed_all"), torch.default_generator.manual_seed)
    cuda = {
        **generator,
        **dict.fromkeys(("set_device", "synchronize", "empty_cache"), _nothing),
        **dict.fromkeys(("current_stream", "default_stream", "Stream", "Event"), _NoStream),
        "random": _Stand(torch.cuda.random, generator),
        "is_available": lambda: False,
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
    }
    parts = {"cuda": _Stand(torch.cuda, cuda), "distributed": _Stand(torch.distributed, _collectives())}
    return _Stand(torch, parts | {name: _on_cpu(getattr(torch, name)) for name in FACTORIES})


KEPT_SENDS = 16
"""More than a pipeline rank has under way at once."""


def _collectives() -> dict[str, Any]:
    """All-to-all with sizes as tensors, gather and scatter of unequal parts, which gloo lacks, and single
    point-to-point calls whose handle and tensor's memory live on for a while.

    Overlapped schedules drop both as soon as the next stage is computed, and take the memory out of a tensor that was
    sent. CUDA streams keep it; gloo's own thread would still read it, and was seen to crash.
    """
    kept: deque[tuple[Any, ...]] = deque(maxlen=KEPT_SENDS)

    def keeping(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def kept_call(*args: Any, **kwargs: Any) -> Any:
            work = call(*args, **kwargs)
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            kept.append((work, *(tensor.detach() for tensor in tensors)))  # other tensors of the same memory
            return work

        return kept_call

    def operation(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A batch of operations accepts torch's own functions only, and waits for all of them.
        return torch.distributed.P2POp(getattr(op, "__wrapped__", op), *args, **kwargs)

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        # Megatron turns a dispatcher's sizes into lists only as it copies them from CUDA.
        sizes = ("output_split_sizes", "input_split_sizes")
        lists = {key: kwargs[key].tolist() for key in sizes if isinstance(kwargs.get(key), torch.Tensor)}
        return torch.distributed.all_to_all_single(*args, **kwargs | lists)

    def all_gather(parts: list[torch.Tensor], part: torch.Tensor, group: Any = None, **options: Any) -> Any:
        if len({each.shape for each in parts}) == 1:
            return torch.distributed.all_gather(parts, part, group, **options)
        parts[torch.distributed.get_rank(group)].copy_(part)
        for rank, each in enumerate(parts):
            torch.distributed.broadcast(each, group=group, group_src=rank)
        return None

    def reduce_scatter(total: torch.Tensor, parts: list[torch.Tensor], group: Any = None, **options: Any) -> Any:
        if len({each.shape for each in parts}) == 1:
            return torch.distributed.reduce_scatter(total, parts, group=group, **options)
        for rank, each in enumerate(parts):
            summed = each.clone()
            torch.distributed.reduce(summed, group=group, group_dst=rank)
            if rank == torch.distributed.get_rank(group):
                total.copy_(summed)
        return None

    sends = {name: keeping(getattr(torch.distributed, name)) for name in ("isend", "irecv")}
    return sends | {"P2POp": operation} | {one.__name__: one for one in (all_to_all_single, all_gather, reduce_scatter)}


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = CPU
        return factory(*args, device=device, **kwargs)

    return create


def _patch_tensor_methods() -> None:
    own_cuda, own_type = torch.Tensor.cuda, torch.Tensor.type

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_from("megatron.core.") else own_cuda(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = own_type(self, *args, **kwargs)
        # Megatron's optimizers sort parameters by the names of CUDA tensor types.
        if not args and not kwargs and _called_from("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.cuda = cuda  # type: ignore[method-assign, assignment]
    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


def _called_from(prefix: str) -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith(prefix)


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
