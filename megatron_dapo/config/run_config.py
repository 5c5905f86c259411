"""Section `run`: where a run lives, how long it goes on, what it keeps."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import STRICT, NonNegativeInt, PositiveFloat, PositiveInt, Text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    dir: Text
    """Run directory: everything the run writes is below it. A directory that holds a run is refused unless `resume`."""

    rollout_steps: PositiveInt
    """The run ends after this many rollout steps."""

    mode: Literal["sync", "colocated", "async"] = "sync"
    """`sync`: servers and trainer take turns. `colocated`: they take turns on the same GPUs. `async`: servers generate
    the next batches while the actor trains (`algorithm.dynamic_sampling.ahead`, `.max_staleness`). See
    docs/run_modes.md."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the prompt order, the mini-batch shuffle and, with `rollout.deterministic`, of every response. Servers
    use it and the numbers after it."""

    resume: bool = False
    """Continue the run in `dir` from its newest complete checkpoint."""

    resume_step: PositiveInt | None = None
    """With `resume`: continue from the checkpoint after this rollout step. Later checkpoints are kept as
    `checkpoints/set_aside.*`."""

    on_damaged_checkpoint: Literal["stop", "take_older"] = "stop"
    """When the checkpoint to resume from is damaged: `stop` and name the command that continues from the newest intact
    one, or `take_older` and continue from that one."""

    max_restarts: NonNegativeInt = 3
    """When a trainer process is lost, the run restarts from its newest checkpoint, at most this many times without a
    new checkpoint in between."""

    checkpoint_every: NonNegativeInt = 10
    """Rollout steps between checkpoints; 0 writes only the last one."""

    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints stay on disk."""

    checkpoint_in_background: bool = True
    """Write checkpoints while the run goes on. The step waits only for a copy in host memory. The run waits for the
    whole checkpoint where free host memory is less than twice the copies, and for the last one."""

    save_batches: bool = False
    """Keep the batch of each step in `<dir>/batches` for `megatron-dapo replay`, as long as a checkpoint before it is
    kept. About 12 bytes a token."""

    export_at_end: bool = True
    """Write the trained model in Hugging Face format to `<dir>/model` when the run ends."""

    start_deadline_s: PositiveFloat = 600.0
    """Seconds that trainer and servers may take to start."""

    step_deadline_s: PositiveFloat = 3600.0
    """Seconds that any one phase of a rollout step may take."""
