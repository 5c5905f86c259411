"""An emulated GPU: tensors in CPU memory that know on which side they are, so that mistakes about it are seen.

A storage is the device's if it was made with `device="cuda"`, copied there, or computed from tensors that are there.
Such tensors say `device == cuda:0`. Two modes see every call of torch in every thread that starts after `install`:

- a host tensor in a collective, or together with a device tensor in one operation, is refused;
- `numpy()` of a device tensor is refused; `item`, `tolist`, `cpu` and blocking copies wait for the device;
- a tensor that a collective still uses may not be touched before `wait` or a synchronisation; after `wait` the data
  is late, and arrives at the first operation that needs it;
- a host tensor that is filled by `non_blocking=True` from the device is not to be read before a synchronisation.

Not seen: memory that is read through a raw pointer or by another process. Streams are one: `record_stream` and
`wait_stream` do nothing.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulated import strict_stream
from tests.emulated.strict_board import StrictError
from tests.emulated.strict_calls import addmm, shapes
from tests.emulated.strict_memory import Storages, meets

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
Side = Literal["cuda", "cpu"]

_HOST_INDEX_OK = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "index_select")
_BETWEEN_SIDES = ("copy_", "_to_copy", "set_", "resize_", "_local_scalar_dense", "detach", "alias")


class EmulatedDevice(strict_stream.Device):
    """Who is where, and which calls still use which memory."""

    def __init__(self) -> None:
        self.here, self.pinned, self.late = Storages(), Storages(), Storages()
        self.flying: list[strict_stream.StrictWork] = []
        self._lock = threading.RLock()
        self._thread = threading.local()

    def side(self, tensor: torch.Tensor) -> Side:
        return "cuda" if tensor in self.here else "cpu"

    @contextmanager
    def making(self, side: Side) -> Iterator[None]:
        """New storages are on that side meanwhile, whatever they are computed from."""
        earlier = getattr(self._thread, "side", None)
        self._thread.side = side
        try:
            yield
        finally:
            self._thread.side = earlier

    # What strict_stream asks.
    def data(self, tensor: torch.Tensor, call: str, *, written: bool, communicator: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            if tensor not in self.here:
                raise StrictError(f"{call}: {shapes([tensor])} is in host memory, and NCCL takes the GPU's only")
            self.touch([(tensor, written)], call, communicator)
            return strict_stream.memory(tensor)

    def enqueued(self, work: strict_stream.StrictWork) -> None:
        with self._lock:
            self.flying = [other for other in self.flying if not (other.done.done() and other.settled)]
            self.flying.append(work)

    def waited(self, work: strict_stream.StrictWork) -> None:
        work.settled = True

    # What the modes ask.
    def touch(self, used: Sequence[tuple[torch.Tensor, bool]], call: str, communicator: Any = None) -> None:
        """`call` uses these tensors, (tensor, whether it writes): bring what is late; refuse what is not waited for.
        Calls of one `communicator` are in order by themselves."""
        if not self.flying:
            return
        with self._lock:
            flying = list(self.flying)
        for work in flying:
            if work.communicator is communicator is not None:
                continue
            writes = [tensor for tensor, _ in used if meets(tensor, work.writes)]
            reads = [tensor for tensor, written in used if written and meets(tensor, work.reads)]
            if not writes and not reads:
                continue
            if not work.settled:
                what = "its result" if writes else "what it still sends"
                raise StrictError(
                    f"{call} touches {shapes(writes or reads)}, {what}, before {work.what} was waited for: a race"
                )
            work.finish()
            with self._lock:
                self.flying = [other for other in self.flying if other is not work]

    def synchronize(self, *_: Any, **__: Any) -> None:
        """The host waits for all that was enqueued."""
        with self._lock:
            flying, self.flying = self.flying, []
        for work in flying:
            work.settled = True
            work.finish()
        self.late.clear()


class _Operations(TorchDispatchMode):
    """Every operator: where its results are, and whether it may use its inputs now."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self.device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch's wrapper against it costs a tenth of a test's time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = self.device
        name, arguments, returns_views = _signature(func)
        used: list[tuple[torch.Tensor, bool]] = []
        for place, (named, keyword_only, written) in enumerate(arguments):
            value = kwargs.get(named) if keyword_only or place >= len(args) else args[place]
            used += [(tensor, written) for tensor in _tensors(value)]
        views = returns_views and not any(written for _, written in used)
        self._check(name, used, views=views)
        if (given := kwargs.get("device")) is not None and _kind(given) == "cuda":
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        result = func(*args, **kwargs)
        side = getattr(device._thread, "side", None)
        if side is None:
            # Autograd itself makes the zeros of a gradient that nobody gave, where the tensors of backward are.
            in_backward = not used and torch._C._current_graph_task_id() != -1
            side = "cuda" if in_backward or any(tensor in device.here for tensor, _ in used) else "cpu"
        known = {tensor.untyped_storage()._cdata for tensor, _ in used}
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                device.here.add(tensor) if side == "cuda" else device.here.discard(tensor)
        if name == "copy_" and _is_late(args, kwargs) and args[0] in device.pinned and args[1] in device.here:
            device.late.add(args[0])
        return result

    def _check(self, name: str, used: Sequence[tuple[torch.Tensor, bool]], *, views: bool) -> None:
        device = self.device
        if not views:
            device.touch(used, f"aten::{name}")
            for tensor, _ in used:
                if tensor in device.late:
                    raise StrictError(
                        f"aten::{name} reads {shapes([tensor])} in host memory, which a non-blocking copy from the "
                        "device fills: nothing has synchronised since"
                    )
        if name in _BETWEEN_SIDES or name in _HOST_INDEX_OK:
            return
        sides = {device.side(tensor) for tensor, _ in used if tensor.dim() > 0 and tensor.numel() > 0}
        if len(sides) == 2:
            here = [tensor for tensor, _ in used if tensor in device.here]
            host = [tensor for tensor, _ in used if tensor not in device.here]
            raise StrictError(
                f"aten::{name} of tensors on both sides: device {shapes(here)}, host {shapes(host)}: "
                "expected all tensors to be on the same device"
            )


@cache
def _signature(func: Any) -> tuple[str, list[tuple[str, bool, bool]], bool]:
    """Of an operator: its name; of each argument the name, whether it is keyword-only and whether it is written; and
    whether a result may be a view. Torch makes these objects anew whenever they are asked for."""
    schema = func._schema
    arguments = [
        (one.name, one.kwarg_only, one.alias_info is not None and one.alias_info.is_write) for one in schema.arguments
    ]
    return schema.name.partition("::")[2], arguments, any(one.alias_info is not None for one in schema.returns)


def _is_late(args: Any, kwargs: Any) -> bool:
    """Of a copy: whether it is non-blocking."""
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided and not value.is_meta else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class _Functions(TorchFunctionMode):
    """What names a device, or leaves torch: answered for the emulated one."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return func(*args, **kwargs)  # a tensor that stands for several, of torch's checkpoints
        own = _OWN.get(func)
        if own is not None:
            return own(self.device, func, args, kwargs)
        pinned = kwargs.pop("pin_memory", False)
        target = kwargs.get("device")
        if target is None and isinstance(func, _METHOD) and func.__name__.startswith("new_") and args:
            target = CUDA if args[0] in self.device.here else None
        elif target is None:
            target = next((arg for arg in args if isinstance(arg, torch.device)), None)
        if target is None:
            return self._pinned(func(*args, **kwargs), pinned)
        if (kind := _kind(target)) == "meta":
            return func(*args, **kwargs)
        side: Side = "cuda" if kind == "cuda" else "cpu"
        kwargs["device"] = CPU
        args = tuple(arg for arg in args if not isinstance(arg, torch.device))
        with self.device.making(side):
            result = func(*args, **kwargs)
        if side == "cuda":  # `torch.tensor` makes its memory where no operator is seen
            for tensor in _tensors(result):
                self.device.here.add(tensor)
        return self._pinned(result, pinned)

    def _pinned(self, result: Any, pinned: bool) -> Any:
        if pinned and isinstance(result, torch.Tensor):
            self.device.pinned.add(result)
        return result


_METHOD = type(torch.Tensor.new_zeros)


def _to(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`tensor.to(...)` in all its forms."""
    tensor, *rest = args
    target = kwargs.pop("device", None)
    if target is None and rest and isinstance(rest[0], (torch.device, str, int)):
        target, *rest = rest
        kwargs |= {name: value for name, value in zip(("dtype", "non_blocking", "copy"), rest, strict=False) if value}
        rest = []
    elif rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
        target, kwargs["dtype"] = (CUDA if other in device.here else CPU), other.dtype
    if target is None:
        return func(tensor, *rest, **kwargs)
    if (kind := _kind(target)) == "meta":
        return func(tensor, target, *rest, **kwargs)
    return _moved(device, func, tensor, "cuda" if kind == "cuda" else "cpu", rest, kwargs)


def _kind(target: Any) -> str:
    """`cuda`, `cpu` or `meta`; a bare number is a GPU's."""
    return "cuda" if isinstance(target, int) else torch.device(target).type


def _moved(device: EmulatedDevice, func: Any, tensor: Any, side: Side, rest: Any, kwargs: dict[str, Any]) -> Any:
    if device.side(tensor) == side:
        return func(tensor, *rest, **kwargs)
    kwargs.pop("non_blocking", None)
    # The operator reads its input, and thereby waits for what is late.
    with device.making(side):
        return func(tensor, *rest, **kwargs | {"copy": True})


def _cpu(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return _moved(device, torch.Tensor.to, args[0], "cpu", (), {})


def _cuda(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return _moved(device, torch.Tensor.to, args[0], "cuda", (), {})


def _where(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return CUDA if args[0] in device.here else func(*args)


def _is_cuda(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0] in device.here


def _is_cpu(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0] not in device.here and func(*args)


def _to_numpy(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if (tensor := args[0]) in device.here:
        raise StrictError(f"numpy() of {shapes([tensor])} on cuda:0: call cpu() first")
    if tensor in device.late:
        raise StrictError(f"numpy() of {shapes([tensor])} that a non-blocking copy from the device still fills")
    return func(*args, **kwargs)


def _to_list(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunction():
        device.touch([(args[0], False)], "tolist()")
    return func(*args, **kwargs)


def _pin(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    copy = args[0].clone()
    device.pinned.add(copy)
    return copy


def _is_pinned(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0] in device.pinned


def _device(device: EmulatedDevice, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return CUDA if args and isinstance(args[0], int) else func(*args, **kwargs)


_T = torch.Tensor
_OWN: dict[Any, Callable[..., Any]] = {
    torch.device: _device,
    torch.addmm: addmm,
    _T.to: _to,
    _T.cpu: _cpu,
    _T.cuda: _cuda,
    _T.device.__get__: _where,
    _T.is_cuda.__get__: _is_cuda,
    _T.is_cpu.__get__: _is_cpu,
    _T.numpy: _to_numpy,
    _T.tolist: _to_list,
    _T.pin_memory: _pin,
    _T.is_pinned: _is_pinned,
}


class _Stream:
    """The one stream of the emulated device."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.synchronize = device.synchronize

    def record_event(self, *_: Any) -> "_Stream":
        """What waits for it waits for all."""
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def install(device: EmulatedDevice) -> None:
    """Every thread of this process that is not a strict stream sees the device from now on."""

    def enter() -> None:
        _Operations(device).__enter__()
        _Functions(device).__enter__()

    enter()
    bootstrap = threading.Thread._bootstrap_inner

    def with_device(thread: threading.Thread) -> None:
        if not thread.name.startswith(strict_stream.THREADS):
            enter()
        bootstrap(thread)

    threading.Thread._bootstrap_inner = with_device
    answer(device, torch.cuda)


def answer(device: EmulatedDevice, cuda: Any) -> None:
    """Let `cuda`, torch's module or what stands for it, answer for the device."""

    class Stream(_Stream):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(device)

    stream = Stream()
    cuda.synchronize = device.synchronize
    cuda.is_initialized = lambda: True
    cuda.current_device = lambda: CUDA.index
    cuda.empty_cache = cuda.set_device = lambda *args, **kwargs: None
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.Stream, cuda.stream = Stream, lambda *args, **kwargs: nullcontext()
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def answer_megatron(device: EmulatedDevice) -> None:
    """Megatron's own torch, which `megatron_dapo.actor.device` gave it for the CPU, names the device instead."""
    from megatron_dapo.actor.device import cpu

    finder = next(finder for finder in sys.meta_path if isinstance(finder, cpu._MegatronFinder))
    answer(device, finder.stand_in.cuda)
    finder.stand_in.cuda.current_device = lambda: CUDA
    finder.stand_in.distributed.batch_isend_irecv = torch.distributed.batch_isend_irecv
    cpu.CPU = CUDA  # where its factories and `current_device` put what Megatron wants on CUDA
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor.to(CUDA)
