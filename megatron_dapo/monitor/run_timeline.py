"""The coordinator's part of the timeline, and which rollout steps are recorded at all."""

from pathlib import Path
from typing import Protocol

from megatron_dapo.monitor.spans import SpanFile
from megatron_dapo.monitor.step_timer import StepTimer
from rollout.generation import ServedPart


class Recorder(Protocol):
    """What is used of cluster.trainer.Trainer."""

    recorded_step: int | None


class Timeline:
    """Records every so many rollout steps: phases and requests here, calls and passes on the trainer's ranks."""

    def __init__(self, run_dir: Path, *, every: int) -> None:
        """`every`: 0 records nothing."""
        self._file = SpanFile(run_dir, "coordinator")
        self._every = every
        self._trainer: Recorder | None = None
        self._recording = False

    def follow(self, trainer: Recorder) -> None:
        """From now on the trainer's ranks record the same steps."""
        self._trainer = trainer

    def begin(self, step: int) -> StepTimer:
        """The clock of rollout step `step`, which writes its phases down if the step is recorded."""
        self._file.write()
        self._recording = bool(self._every) and step % self._every == 0
        if self._trainer is not None:
            self._trainer.recorded_step = step if self._recording else None
        if self._recording:
            self._file.begin(step)
        return StepTimer(self._file if self._recording else None)

    def served(self, part: ServedPart) -> None:
        """A server's answer to a request."""
        if self._recording:
            self._file.add(
                f"server {part.url}",
                part.request_id,
                part.start,
                part.end,
                prompt=part.prompt_tokens,
                tokens=part.tokens,
                version=part.weight_version,
                reason=str(part.finish_reason),
            )

    def close(self) -> None:
        """Write what is left."""
        self._file.write()
