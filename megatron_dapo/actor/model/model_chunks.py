"""Build the model chunks that one rank holds."""

import math

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import silu

from megatron_dapo.actor.device import DeviceChoice
from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.actor.model.layers import HiddenStatesOutput, local_spec, transformer_engine_spec
from megatron_dapo.actor.model.packed_attention import Rotary
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig


def build_model(hf: HFModelConfig, actor: ActorConfig, dtype: str, device: DeviceChoice) -> list[GPTModel]:
    """The model chunks of this rank, one a virtual pipeline stage, weights not yet set (see `weights.load_hf_weights`).

    `dtype` is "float32" or "bfloat16". The process groups must be up (`process_groups.initialise`). The chunks have a
    vocabulary padded to a multiple of the tensor-parallel size: the logits' columns from `hf.vocab_size` on mean
    nothing. Under `actor.fused_linear_log_prob` the last stage's output is hidden states instead of logits.

    Raises:
        ConfigError: the layout does not divide the model.
    """
    config = transformer_config(hf, actor, dtype, device)
    inverse_frequencies = hf.inverse_frequencies().to(device.device)
    virtual = actor.layout.virtual_pipeline
    chunks = []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        if device.transformer_engine:
            spec = transformer_engine_spec(config)
        else:
            spec = local_spec(config, rotary=Rotary(inverse_frequencies), vp_stage=vp_stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocab_size(hf, actor.layout.tensor),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=hf.tied,
            position_embedding_type="rope" if device.transformer_engine else "none",
            rotary_base=hf.rope_theta,
            vp_stage=vp_stage,
        )
        if device.transformer_engine:
            # Megatron's own Llama 3 scaling takes the factor alone and assumes the other three numbers.
            chunk.rotary_pos_emb.inv_freq = inverse_frequencies
        if actor.fused_linear_log_prob and chunk.post_process:
            chunk.output_layer = HiddenStatesOutput.of(chunk.output_layer)
        chunks.append(chunk)
    return chunks


def padded_vocab_size(hf: HFModelConfig, tensor_parallel: int) -> int:
    """Rows of embedding and output layer: the vocabulary rounded up to a multiple of the tensor-parallel size."""
    return math.ceil(hf.vocab_size / tensor_parallel) * tensor_parallel


def transformer_config(hf: HFModelConfig, actor: ActorConfig, dtype: str, device: DeviceChoice) -> TransformerConfig:
    """Megatron's config: the model, the layout, the precision, and the fusions that the device has."""
    layout = actor.layout
    check_layout(hf, layout)
    cuda = device.device.type == "cuda"
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    return TransformerConfig(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.ffn_hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_query_groups,
        kv_channels=hf.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.norm_epsilon,
        qk_layernorm=hf.qk_norm,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=hf.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch_dtype,
        pipeline_dtype=torch_dtype,
        autocast_dtype=torch_dtype,
        bf16=torch_dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence_parallel,
        # Every weight is read from the checkpoint.
        perform_initialization=False,
        use_cpu_initialization=not cuda,
        # The loss is a sum of weighted tokens: gradients are summed over ranks, never averaged.
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=device.transformer_engine,
        gradient_accumulation_fusion=device.gradient_accumulation,
        fp8=None if actor.fp8 == "none" else actor.fp8,
        fp8_recipe=actor.fp8_recipe,
        **_pipeline_settings(layout),
        **_recompute_settings(actor),
    )


def _pipeline_settings(layout: LayoutConfig) -> dict[str, object]:
    """Micro-batches differ in length, so pipeline ranks tell each other shapes; Megatron ties that to a dispatcher."""
    settings: dict[str, object] = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    settings["deallocate_pipeline_outputs"] = True
    if layout.virtual_pipeline:
        # Batched point-to-point calls give wrong gradients with virtual stages over gloo.
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return settings


def _recompute_settings(actor: ActorConfig) -> dict[str, object]:
    if actor.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if actor.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}
