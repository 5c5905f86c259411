"""When a rank's passes ran: stands where Megatron's schedules look for timers (`config.timers`).

They start and stop one by name around each micro-batch's forward and backward, each transfer between pipeline stages
and the sum of the gradients. On CUDA a stop is an event in the stream, not a wait for it: the passes run as they would.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch


class PassClock:
    """Times of one call of the actor, by the names that Megatron gives them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._open: dict[str, Any] = {}
        self._done: list[tuple[str, Any, Any, dict[str, Any]]] = []
        self._about: dict[str, Any] = {}
        if self._cuda:
            torch.cuda.synchronize(device)
        self._epoch, self._zero = time.time(), self._now()

    def __call__(self, name: str, log_level: int | None = None) -> SimpleNamespace:
        """Megatron's interface; every level is taken."""
        return SimpleNamespace(start=partial(self.start, name), stop=partial(self.stop, name))

    def describe(self, **about: Any) -> None:
        """Says of the pass that is under way what it is about."""
        self._about = about

    def start(self, name: str, barrier: bool = False) -> None:
        """`barrier` is Megatron's wish to let all ranks wait for each other: a measurement must not."""
        self._about = {}
        self._open[name] = self._now()

    def stop(self, name: str, barrier: bool = False) -> None:
        self._done.append((name, self._open.pop(name), self._now(), self._about))
        self._about = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def times(self) -> list[tuple[str, float, float, dict[str, Any]]]:
        """(name, start, end, about) of all that was stopped, in seconds since 1970; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        return [(name, self._epoch_of(start), self._epoch_of(end), about) for name, start, end, about in self._done]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _epoch_of(self, mark: Any) -> float:
        return self._epoch + float(self._zero.elapsed_time(mark) / 1e3 if self._cuda else mark - self._zero)
