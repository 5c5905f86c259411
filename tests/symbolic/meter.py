"""Memory of the symbolic device, and the places where the host waits for it."""

import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

REAL_BYTES = 2**26
"""What is copied from the device to the host is a real tensor of ones up to this size, symbolic above."""

_SOURCES = ("/megatron_dapo/", "/megatron/core/", "/transformer_engine/")
_aten = torch.ops.aten


class Meter(TorchDispatchMode):
    """Enter it inside a FakeTensorMode. Operations on CPU tensors are made for real."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "build"
        self.bytes = 0
        self.peaks: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        """(what, place, loop or "") to how often."""
        self._sizes: dict[int, int] = {}

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """What happens inside belongs to `phase`."""
        before, self.phase = self.phase, phase
        self._peak()
        try:
            yield
        finally:
            self.phase = before

    def wait(self, what: str) -> None:
        """Note that the host waits for the device here."""
        self.waits[what, place(), loop_of_main_thread()] += 1

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Its size has changed without an operation on a tensor."""
        if storage._cdata in self._sizes:
            self._count(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fakes = [value for value in tree_iter((args, kwargs)) if isinstance(value, FakeTensor)]
        device = kwargs.get("device")
        to_host = device is not None and torch.device(device).type == "cpu"
        if not fakes and (device is None or to_host):
            with no_dispatch():
                return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            self.wait("a number read from the device")
            return True if args[0].dtype == torch.bool else 1 if not args[0].is_floating_point() else 1.0
        if func is _aten._to_copy.default and to_host and args[0].device.type == "cuda":
            return self._copy_to_host(func, args, kwargs)
        if func is _aten.copy_.default and self._note_copy(args, kwargs):
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if func is _aten._to_copy.default and not fakes:
            # A real tensor; FakeTensorMode would copy its numbers to the device that is not there.
            dtype = kwargs.get("dtype") or args[0].dtype
            result = torch.empty(args[0].shape, dtype=dtype, device=device)
        else:
            result = func(*args, **kwargs)
        for value in tree_iter(result):
            if isinstance(value, FakeTensor) and value.device.type == "cuda":
                self._count(value.untyped_storage())
        return result

    def _copy_to_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not kwargs.get("non_blocking"):
            self.wait("a copy to the host")
        if args[0].nbytes > REAL_BYTES:
            return func(*args, **kwargs)
        with no_dispatch():
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)

    def _note_copy(self, args: Any, kwargs: Any) -> bool:
        """Whether a copy is done with, because its target is a real tensor."""
        target, source = args[:2]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if target.device.type == "cpu" and source.device.type == "cuda" and blocking:
            self.wait("a copy to the host")
        return not isinstance(target, FakeTensor)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key)
        self.bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._peak()

    def _gone(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key, 0)

    def _peak(self) -> None:
        self.peaks[self.phase] = max(self.peaks[self.phase], self.bytes)


def place() -> str:
    """The innermost line of this project, Megatron or TransformerEngine: "megatron_dapo/actor/step.py:120 log_probs".

    Autograd runs backward in a thread of its own; where that has none the main thread's line counts."""
    for frame, line in itertools.chain(walk_stack(sys._getframe(1)), walk_stack(_main_frame())):
        file = frame.f_code.co_filename
        if source := next((one for one in _SOURCES if one in file), None):
            return f"{source[1:]}{file.rpartition(source)[2]}:{line} {frame.f_code.co_name}"
    return "?"


def loop_of_main_thread() -> str:
    """Megatron's schedule, if it is in its loop over micro-batches; "" otherwise."""
    found = ""
    for frame, _ in walk_stack(_main_frame()):
        name = frame.f_code.co_name
        if name in ("finalize_model_grads", "sum_gradients"):
            return ""
        if name.startswith("forward_backward_") and frame.f_code.co_filename.endswith("/schedules.py"):
            found = name
    return found


def _main_frame() -> FrameType:
    return sys._current_frames()[threading.main_thread().ident or 0]
