"""Which modules a transformer layer is built of: TransformerEngine's on CUDA where it is there, else local ones."""

from functools import partial

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dapo.actor.model.packed_attention import PackedAttention, Rotary
from megatron_dapo.actor.model.rms_norm import RMSNorm


def transformer_engine_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's spec of TransformerEngine layers; Megatron applies the rotary embedding."""
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)


def local_spec(config: TransformerConfig, *, rotary: Rotary, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's spec of local layers with our norms and our attention, which also applies the rotary embedding."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = partial(PackedAttention, rotary=rotary)
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
