"""Section `actor`: how Megatron-Core trains."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import STRICT, DecayRates


def _recompute(value: Any, validate: Any) -> Any:
    try:
        found = validate(value)
    except ValidationError:  # which speaks of each kind of value by itself
        wanted = "none, full, a number of layers, or a list of mlp, moe, layernorm, core_attn"
        raise ValueError(f"must be {wanted}") from None
    if isinstance(found, tuple) and len(set(found)) < len(found):
        raise ValueError("must name each part once")
    return found


Modules = Annotated[tuple[Literal["mlp", "moe", "layernorm", "core_attn"], ...], Field(strict=False, min_length=1)]
Recompute = Annotated[Literal["none", "full"] | PositiveInt | Modules, WrapValidator(_recompute)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LayoutConfig:
    tensor: PositiveInt = 1
    """Tensor-parallel size (TP)."""

    pipeline: PositiveInt = 1
    """Pipeline-parallel size (PP)."""

    virtual_pipeline: Annotated[int, Field(ge=2)] | None = None
    """Model chunks a pipeline rank holds (interleaved schedule); none: one chunk."""

    context: PositiveInt = 1
    """Context-parallel size (CP): each sequence is split over this many ranks."""

    data: PositiveInt = 1
    """Data-parallel size (DP)."""

    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks too; needs `tensor` > 1."""

    expert: PositiveInt = 1
    """Expert-parallel size (EP): a layer's experts are split over this many of a stage's ranks."""

    expert_tensor: PositiveInt = 1
    """Tensor-parallel size of each expert (ETP); with `expert` = 1 it is `tensor`."""

    @property
    def world_size(self) -> int:
        """Number of trainer processes."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_replicas(self) -> int:
        """Ranks of a stage that hold the same part of the same experts."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""

    betas: DecayRates = (0.9, 0.999)
    """AdamW's decay rates."""

    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; biases and norms have none."""

    clip_norm: NonNegativeFloat = 1.0
    """Global gradient norm above which the gradient is scaled down; 0: off."""

    warmup_rollout_steps: NonNegativeFloat = 20
    """Rollout steps of linear warm-up; constant afterwards."""

    distributed: bool = True
    """Shard optimizer state over the data-parallel ranks (Megatron's distributed optimizer)."""

    on_cpu: bool = False
    """Step on the CPU, with `actor.threads` of each process, while gradients and weights are copied: moments and master
    weights are in host memory only. Needs `distributed` and bfloat16."""

    compact: Literal["none", "weights", "all"] = "none"
    """`weights`: of master weights only the half that the bfloat16 weights lack is kept, 10 bytes a number instead of
    12. `all`: moments in bfloat16 too, 6 bytes; `betas` at most 0.99, above which rounding stops the decay.
    By TransformerEngine's FusedAdam on CUDA. Needs `distributed`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OffloadConfig:
    optimizer_state: bool = False
    """Keep moments and master weights in host memory but for optimizer steps."""

    between_phases: Literal["none", "optimizer", "all"] = "none"
    """What leaves for host memory while the trainer is idle: `optimizer` (gradients, moments, master weights) or `all`
    (weights too)."""

    communicators: bool = False
    """With `colocated`: NCCL's buffers too; needs NCCL 2.29.7 (docs/run_modes.md)."""


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig:
    rank: Annotated[int, Field(ge=0)] = 0
    """Train LoRA adapters of this rank (arXiv 2106.09685) and nothing else; 0: every weight."""

    alpha: PositiveFloat = 32.0
    """Trainer and servers calculate with W + alpha / rank x B A, merged."""

    modules: Annotated[tuple[Projection, ...], Field(strict=False, min_length=1)] = get_args(Projection)
    """Projections of every layer that have an adapter."""

    @property
    def scale(self) -> float:
        """Of the product B A."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActorConfig:
    """Section `actor`: how Megatron-Core trains."""

    layout: LayoutConfig = LayoutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    offload: OffloadConfig = OffloadConfig()
    lora: LoraConfig = LoraConfig()

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where a GPU is visible, else the CPU over gloo."""

    micro_batch_tokens: PositiveInt = 32768
    """Token budget of a packed micro-batch on one rank (prompt and response); a longer sequence gets one of its own."""

    recompute: Recompute = "none"
    """What backward computes again instead of keeping it. `full`: every layer. A number: the first so many of each
    pipeline stage, with virtual stages of each of these. A list: parts of every layer: `mlp`, `moe` (the experts),
    `layernorm` (the one before experts, with TransformerEngine), `core_attn` (saves nothing with TransformerEngine)."""

    overlap: bool | None = None
    """Communicate while computing: sum gradients in backward, gather the distributed optimizer's weights in forward
    (not with adapters), pass on virtual stages' outputs. Not tensor parallelism, nor CUDA graphs: both need one shape.
    None: on CUDA; virtual stages everywhere."""

    fp8: Literal["none", "e4m3", "hybrid"] = "none"
    """FP8 format of matrix products inside the layers, by TransformerEngine on CUDA. `hybrid`: E4M3 forward, E5M2
    backward. Weights, gradients, embedding and output layer stay as they are."""

    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = "tensorwise"
    """How TransformerEngine scales FP8 tensors; `blockwise` needs Hopper, `mxfp8` Blackwell."""

    logprob_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits are converted to float32 at a time. None: chosen from the device."""

    routing_replay: bool = False
    """Mixture of experts: the trainer sends each token to the experts that the servers chose (R3, arXiv 2510.11370)."""

    fused_linear_log_prob: bool = False
    """Log-probs in blocks of the vocabulary, without logits: saves tokens x vocabulary / TP numbers twice, costs a
    matrix product."""

    threads: PositiveInt = 1
    """CPU threads of each trainer process."""

    @property
    def row_multiple(self) -> int:
        """What the tokens of a packed row on one rank are rounded up to: FP8 products take whole blocks of them."""
        if self.fp8 == "none":
            return 1
        return 128 if self.fp8_recipe == "blockwise" else 32 if self.fp8_recipe == "mxfp8" else 16
