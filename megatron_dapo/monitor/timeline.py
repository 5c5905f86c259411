"""Seconds of a rollout step's phases, and what each process did when, in the steps that `monitor.timeline_every` names.

`timeline/<process>.jsonl`: a process begins each step with a line that says what it is; its spans follow. Times are
seconds since 1970 by the clock of its machine, so that the processes of several nodes agree as well as their clocks do.
A step that a resumed run does again begins again; readers take the newest beginning.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_dapo.storage.durable import append_lines
from rollout.generation import ServedPart

FOLDER = "timeline"
PHASES = "rollout", "environment", "reward", "logprob", "update", "weight_sync", "handover", "evaluation", "checkpoint"


class SpanFile:
    """Gathers the spans of one process and writes them when the step, or a part of it, is over."""

    def __init__(self, run_dir: Path, process: str, about: Mapping[str, Any] | None = None) -> None:
        self._path = run_dir / FOLDER / f"{process}.jsonl"
        self._about = dict(about or {})
        self._begun: int | None = None
        self._lines: list[str] = []

    def begin(self, step: int) -> None:
        """What follows belongs to `step`; harmless when it does already."""
        if step != self._begun:
            self.write()
            self._begun = step
            self._lines.append(json.dumps({"step": step, "about": self._about}))

    def add(self, track: str, name: str, start: float, end: float, **about: Any) -> None:
        """`start`, `end`: seconds since 1970."""
        self._lines.append(json.dumps({"track": track, "name": name, "start": start, "end": end, "about": about}))

    def write(self) -> None:
        """Append what was gathered to the file."""
        if self._lines:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(self._path, self._lines)
            self._lines = []


class StepTimer:
    """Adds up a rollout step's seconds by phase, or a run's by what it is doing; what no phase claims is the
    coordinator's own share of `step`."""

    def __init__(self, spans: SpanFile | None = None) -> None:
        """`spans`: gets each phase as it was, before `move`."""
        self._spans, self._began = spans, time.monotonic()
        self._seconds = defaultdict(float, dict.fromkeys(PHASES, 0.0))

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


class Timeline:
    """Records every so many rollout steps: phases and requests here, calls and passes on the trainer's ranks."""

    def __init__(self, run_dir: Path, trainer: Any, *, every: int) -> None:
        """`trainer`: a cluster.trainer.Trainer, whose `recorded_step` is set; `every`: 0 records nothing."""
        self._file = SpanFile(run_dir, "coordinator")
        self._every, self._trainer, self._recording = every, trainer, False

    def begin(self, step: int) -> StepTimer:
        """The clock of rollout step `step`, which writes its phases down if the step is recorded."""
        self._file.write()
        self._recording = bool(self._every) and step % self._every == 0
        self._trainer.recorded_step = step if self._recording else None
        if self._recording:
            self._file.begin(step)
        return StepTimer(self._file if self._recording else None)

    def served(self, part: ServedPart) -> None:
        """A server's answer to a request."""
        if self._recording:
            about = {"prompt": part.prompt_tokens, "tokens": part.tokens, "version": part.weight_version}
            reason = str(part.finish_reason)
            self._file.add(f"server {part.url}", part.request_id, part.start, part.end, **about, reason=reason)

    def close(self) -> None:
        """Write what is left."""
        self._file.write()
