"""Sections `run`, `model` and `monitor`: where a run lives and how long it goes on, what it trains, what is watched."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import STRICT, Text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """Section `run`: where a run lives, how long it goes on, what it keeps."""

    dir: Text
    """Where the run writes everything. A directory that holds a run is refused unless `resume`."""

    rollout_steps: PositiveInt
    """The run ends after this many rollout steps."""

    mode: Literal["sync", "colocated", "async"] = "sync"
    """`sync`: a batch is drawn, then trained. `colocated`: on the same GPUs. `async`: servers draw the next batches
    meanwhile. See docs/run_modes.md."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the prompt order, the mini-batch shuffle and, with `rollout.deterministic`, of every response. Servers
    use it and the numbers after it."""

    resume: bool = False
    """Continue the run in `dir` from its newest complete checkpoint."""

    resume_step: PositiveInt | None = None
    """With `resume`: continue from the checkpoint after this rollout step. Later checkpoints are kept as
    `checkpoints/set_aside.*`."""

    on_damaged_checkpoint: Literal["stop", "take_older"] = "stop"
    """Where the checkpoint to resume from is damaged: `stop` and name the command that takes the newest intact one, or
    `take_older`: take it."""

    max_restarts: NonNegativeInt = 3
    """At most so many restarts from the newest checkpoint after lost trainer processes, without a new one in
    between."""

    checkpoint_every: NonNegativeInt = 10
    """Rollout steps between checkpoints; 0: only by time, and the last."""

    checkpoint_minutes: NonNegativeFloat = 60.0
    """Also written, as is a long rollout, before a lost job would cost more than so many minutes, or one step; 0:
    never."""

    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints stay on disk."""

    checkpoint_in_background: bool = True
    """Write checkpoints from a copy in host memory while the run goes on. It waits for the last one, and where free
    host memory is less than twice the copies."""

    export_at_end: bool = True
    """Write the trained model in Hugging Face format to `<dir>/model` when the run ends."""

    start_deadline_s: PositiveFloat = 600.0
    """Seconds that trainer and servers may take to start."""

    step_deadline_s: PositiveFloat = 3600.0
    """Seconds that any one phase of a rollout step may take."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """Section `model`: which weights are trained."""

    path: str
    """Folder in Hugging Face format: config.json, safetensors, tokenizer. Or `hf://OWNER/NAME` or
    `hf://OWNER/NAME@REVISION`: fetched from the Hugging Face hub before the run."""

    context_length: PositiveInt
    """Longest prompt plus response in tokens; also the server's context length."""

    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    """Tokens that end a response. Empty: those of tokenizer, generation_config.json and config.json, which must agree.
    SGLang always ends at the last two's, so these must be included."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights in forward, backward and on servers; optimizer and master weights are float32."""

    fp32_head: bool = False
    """Where `dtype` is bfloat16: output layer and log-probs in float32, on trainer (in blocks of the vocabulary) and
    servers (--enable-fp32-lm-head). Slower on GPUs."""

    @property
    def upcasts_head(self) -> bool:
        """Whether the output layer calculates in a wider type than the rest."""
        return self.fp32_head and self.dtype != "float32"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WandbConfig:
    mode: Literal["off", "offline", "online"] = "off"
    """Send every metric to Weights & Biases too; `offline` keeps it in `<run.dir>/wandb` for `wandb sync`. Needs pip
    install 'megatron-dapo[wandb]'."""

    project: Text = "megatron-dapo"
    """Project there."""

    entity: Text | None = None
    """User or team there; none: the key's own."""

    name: Text | None = None
    """Name of the run there; none: that of the run directory."""

    samples: bool = False
    """Send the texts of samples.jsonl too."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MonitorConfig:
    """Section `monitor`: what is watched and when it stops a run."""

    tensorboard: bool = True
    """Write every metric to `<run.dir>/tensorboard` as well."""

    wandb: WandbConfig = WandbConfig()

    timeline_every: NonNegativeInt = 0
    """Record phases, requests, micro-batches and memory peaks in `<run.dir>/timeline` every so many rollout steps, for
    `tools/profile_throughput.py`. 0: never."""

    mismatch_warn: PositiveFloat = 0.05
    """Mean |engine - trainer| log-prob of a step above which a warning is printed."""

    mismatch_stop: PositiveFloat = 1.0
    """The same, above which the run stops. If older weights wrote all tokens, these are compared."""

    sample_responses: NonNegativeInt = 2
    """Responses of each step kept in `<run.dir>/samples.jsonl`, and as many without a verdict or on which `exact` and
    `robust` disagree."""
