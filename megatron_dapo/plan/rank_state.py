"""Bytes of parameters, gradients and optimizer state of one trainer rank, as Megatron-Core lays them out.

Gradients are float32; so are, but for `actor.optimizer.compact`, master weights and both moments of Adam. With the
distributed optimizer each data- and context-parallel rank owns an equal part of the last two; of experts, which have
buffers of their own, each rank that holds the same ones. Megatron pads its buffers besides, by kilobytes; that is not
counted. LoRA's adapters are float32, and all that has gradients and optimizer state.
"""

import math
from dataclasses import asdict, dataclass

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig, LoraConfig

GRADIENT_BYTES = 4
MASTER_BYTES = 4
MOMENT_BYTES = 8
STATE_BYTES = {"none": (MASTER_BYTES, MOMENT_BYTES), "weights": (2, MOMENT_BYTES), "all": (2, 4)}
"""Of a master weight, and of its moments, by `actor.optimizer.compact`."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
JOINED = ({"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"})
"""Projections that are one weight in Megatron."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """What a rank holds from start to end."""

    parameters: int
    gradients: int
    master_weights: int
    moments: int

    @property
    def total(self) -> int:
        """Of all four."""
        return sum(self.items().values())

    def items(self) -> dict[str, int]:
        """Bytes by what they hold."""
        return {name.replace("_", " "): value for name, value in asdict(self).items()}


def rank_state(hf: HFModelConfig, actor: ActorConfig, dtype: str, *, stage: int) -> StateBytes:
    """State of any rank of pipeline stage `stage`."""
    layout = actor.layout
    trained = stage_parameters(hf, layout, stage)
    parameters = trained * DTYPE_BYTES[dtype]
    if actor.lora.rank:
        trained = hf.num_layers // layout.pipeline * adapter_parameters(hf, actor.lora, layout.tensor)
        parameters += trained * MASTER_BYTES
    owned = trained
    if actor.optimizer.distributed:
        experts = apart_parameters(hf, layout)
        owned = math.ceil((trained - experts) / (layout.data * layout.context) + experts / layout.expert_replicas)
    # Weights that are float32 already are their own master weights.
    master_bytes, moment_bytes = STATE_BYTES[actor.optimizer.compact]
    masters = owned * master_bytes if dtype != "float32" and not actor.lora.rank else 0
    gradients, moments = trained * GRADIENT_BYTES, owned * moment_bytes
    return StateBytes(parameters=parameters, gradients=gradients, master_weights=masters, moments=moments)


def stage_parameters(hf: HFModelConfig, layout: LayoutConfig, stage: int) -> int:
    """Elements on each tensor-parallel rank of a pipeline stage. The last stage has the output layer, or, with several
    stages, its own copy of a tied embedding."""
    first, last = stage == 0, stage == layout.pipeline - 1
    vocabulary = math.ceil(hf.vocab_size / layout.tensor) * hf.hidden_size
    elements = hf.num_layers // layout.pipeline * _layer_parameters(hf, layout.tensor) + stage_experts(hf, layout)
    elements += vocabulary if first else 0
    if last:
        elements += hf.hidden_size + (0 if first and hf.tied else vocabulary)
    return elements


def apart_parameters(hf: HFModelConfig, layout: LayoutConfig) -> int:
    """Of a rank's elements those whose gradients are summed over `layout.expert_replicas`: experts that are split."""
    return stage_experts(hf, layout) if layout.expert > 1 else 0


def stage_experts(hf: HFModelConfig, layout: LayoutConfig) -> int:
    """Of a rank's elements those of experts; 0 for a dense model."""
    if hf.experts is None:
        return 0
    own = hf.num_layers // layout.pipeline * (hf.experts.count // layout.expert)
    return own * 3 * hf.hidden_size * (hf.experts.ffn_hidden_size // layout.expert_tensor)


def adapter_parameters(hf: HFModelConfig, lora: LoraConfig, tensor: int = 1) -> int:
    """Elements of a layer's LoRA adapters on each tensor-parallel rank: one half of each is cut, the other, of
    `hidden_size`, whole."""
    sizes = projections(hf, tensor)
    return sum(lora.rank * (hf.hidden_size + sizes[name]) for name in lora.modules)


def adapted(hf: HFModelConfig, actor: ActorConfig) -> list[int]:
    """Elements on a tensor-parallel rank of each of a layer's weights with an adapter, as Megatron joins them."""
    sizes = projections(hf, actor.layout.tensor)
    joined = [names for names in JOINED if not names.isdisjoint(actor.lora.modules)] if actor.lora.rank else []
    return [hf.hidden_size * sum(sizes[name] for name in names) for names in joined]


def base_bytes(hf: HFModelConfig, actor: ActorConfig, dtype: str) -> int:
    """Host memory of a rank for its weights without their adapters; it is read once in an optimizer step."""
    return hf.num_layers // actor.layout.pipeline * sum(adapted(hf, actor)) * DTYPE_BYTES[dtype]


def projections(hf: HFModelConfig, tensor: int) -> dict[str, int]:
    """Rows or columns of each projection on a tensor-parallel rank; it has `hidden_size` of the other."""
    queries, narrow = (heads * hf.head_dim // tensor for heads in (hf.num_attention_heads, hf.num_query_groups))
    sizes = {"q_proj": queries, "o_proj": queries, "k_proj": narrow, "v_proj": narrow}
    return sizes | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hf.ffn_hidden_size // tensor)


def trained_parameters(hf: HFModelConfig, lora: LoraConfig) -> int:
    """Elements of the whole model that have optimizer state."""
    return hf.num_layers * adapter_parameters(hf, lora) if lora.rank else model_parameters(hf)


def model_parameters(hf: HFModelConfig) -> int:
    """Elements of the whole model, a tied embedding counted once."""
    return stage_parameters(hf, LayoutConfig(), 0)


def expert_parameters(hf: HFModelConfig) -> int:
    """Elements of all experts; 0 for a dense model."""
    return stage_experts(hf, LayoutConfig())


def active_parameters(hf: HFModelConfig) -> int:
    """Elements that one token passes: of the experts those that it is sent to."""
    unused = 0.0 if hf.experts is None else 1 - hf.experts.top_k / hf.experts.count
    return model_parameters(hf) - round(unused * expert_parameters(hf))


def _layer_parameters(hf: HFModelConfig, tensor: int) -> int:
    """Without experts."""
    hidden, queries = hf.hidden_size, hf.num_attention_heads * hf.head_dim // tensor
    fused = queries + 2 * hf.num_query_groups * hf.head_dim // tensor
    vectors = 2 * hidden + fused * hf.qkv_bias + 2 * hf.head_dim * hf.qk_norm
    mlp = hidden * hf.experts.count if hf.experts else 3 * hidden * (hf.ffn_hidden_size // tensor)
    return vectors + hidden * (queries + fused) + mlp
