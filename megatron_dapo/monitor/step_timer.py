"""Wall-clock seconds of a rollout step's phases."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dapo.monitor.spans import SpanFile

NAMES = ("rollout", "reward", "logprob", "update", "weight_sync", "handover", "evaluation", "checkpoint")


class StepTimer:
    """Adds up seconds by phase; what no phase claims is the coordinator's own share of `step`."""

    def __init__(self, spans: SpanFile | None = None) -> None:
        """`spans`: gets each phase as it was, before `move`."""
        self._spans = spans
        self._began = time.monotonic()
        self._seconds = dict.fromkeys(NAMES, 0.0)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        began, start = time.monotonic(), time.time()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - began
            if self._spans is not None:
                self._spans.add("phases", name, start, time.time())

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` of one phase as another's."""
        seconds = min(seconds, self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def seconds(self) -> dict[str, float]:
        """By phase, and `step` for all since the start."""
        return self._seconds | {"step": time.monotonic() - self._began}
