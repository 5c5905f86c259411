"""Reads the timeline that monitor/timeline.py writes: what each process did in the recorded rollout steps."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dapo.monitor.timeline import FOLDER


class SpanError(ValueError):
    """A timeline file that cannot be read. The message names file and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Span(track="update", name="forward-compute", start=1763740000.25, end=1763740000.31, about={"tokens": 4096})"""

    track: str
    """What the process does one thing of at a time: a call, a server's requests."""
    name: str
    start: float
    end: float
    about: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStep:
    """One process in one rollout step."""

    process: str
    step: int
    about: Mapping[str, Any]
    """Of a trainer rank: its place in the layout."""
    spans: tuple[Span, ...]


def read_spans(run_dir: Path) -> dict[int, list[ProcessStep]]:
    """Rollout step -> its processes, by name. Empty where nothing was recorded.

    Raises:
        SpanError: a line other than a torn last one is no span.
    """
    steps: dict[int, list[ProcessStep]] = {}
    for path in sorted((run_dir / FOLDER).glob("*.jsonl")):
        for process in _read_file(path):
            steps.setdefault(process.step, []).append(process)
    return dict(sorted(steps.items()))


def _read_file(path: Path) -> list[ProcessStep]:
    content = path.read_bytes()
    steps: dict[int, tuple[dict[str, Any], list[Span]]] = {}
    spans: list[Span] | None = None
    for number, text in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            line = json.loads(text)
            if "step" in line:
                for later in [step for step in steps if step >= line["step"]]:
                    del steps[later]  # done again after a resume
                spans = []
                steps[line["step"]] = (line["about"], spans)
            elif spans is not None:
                spans.append(Span(**line))
        except (ValueError, TypeError, KeyError) as error:
            raise SpanError(f"{path}:{number}: no span ({error!r}); remove the line or the file") from None
    return [
        ProcessStep(process=path.stem, step=step, about=about, spans=tuple(spans))
        for step, (about, spans) in steps.items()
    ]
