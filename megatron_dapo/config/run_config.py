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
    """The run ends after this many rollout steps (each: fill a batch, then `mini-batches` optimizer steps)."""

    mode: Literal["sync", "colocated", "async"] = "sync"
    """`sync`: servers wait while the actor trains, and the reverse. `colocated`: so too, both on the same GPUs, whose
    memory each leaves to the other. `async`: servers write the next batches while the actor trains;
    `algorithm.dynamic_sampling.ahead` and `.max_staleness` say how far ahead."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the prompt order, the mini-batch shuffle and, with `rollout.deterministic`, of every response. Servers
    take it and the numbers after it."""

    resume: bool = False
    """Continue the run in `dir` from its newest complete checkpoint; the ledger goes on where that checkpoint
    stands."""

    resume_step: PositiveInt | None = None
    """With `resume`: continue from the checkpoint after this rollout step instead of the newest one, which may be
    damaged. Later checkpoints are kept as `checkpoints/set_aside.*`."""

    on_damaged_checkpoint: Literal["stop", "take_older"] = "stop"
    """When a file of the checkpoint to resume from is missing or damaged: `stop` with its name and the command that
    continues from the newest intact one, or `take_older`: continue from that one, as `resume_step` would."""

    max_restarts: NonNegativeInt = 3
    """When a trainer process is lost the run starts again from its newest checkpoint by itself, at most this many times
    without a new checkpoint in between."""

    checkpoint_every: NonNegativeInt = 10
    """Rollout steps between checkpoints; 0 writes only the last one."""

    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints stay on disk."""

    checkpoint_in_background: bool = True
    """Write a checkpoint while the run goes on: the step waits only until the trainer processes have copied what they
    write to host memory, one copy at a time. Where a host's free memory is less than twice the copies of its processes,
    and for the last checkpoint of a run, the step waits as with `false`."""

    save_batches: bool = False
    """Keep each step's batch in `<dir>/batches`, as long as a checkpoint before it is kept, and the first step's:
    `megatron-dapo replay` computes a step again from both. About 12 bytes a token."""

    export_at_end: bool = True
    """Write the trained model in Hugging Face format to `<dir>/model` when the run ends."""

    start_deadline_s: PositiveFloat = 600.0
    """Seconds that trainer and servers may take to get ready before the run stops with the reason."""

    step_deadline_s: PositiveFloat = 3600.0
    """Seconds that any one phase of a rollout step may take before the run stops with the reason."""
