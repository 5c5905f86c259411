"""Build the model chunks that one rank holds.

Their modules are TransformerEngine's layers on CUDA where it is installed, else Megatron's local ones with our norm and
attention; and the output layer of `actor.fused_linear_log_prob` and `model.fp32_head`.
"""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.nn.functional import silu

from megatron_dapo.actor.device import DeviceChoice
from megatron_dapo.actor.model import routing_replay
from megatron_dapo.actor.model.hf_config import HFModelConfig, check_actor
from megatron_dapo.actor.model.packed_attention import PackedAttention, Rotary
from megatron_dapo.actor.packing import round_up
from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig, Recompute
from megatron_dapo.config.base import ConfigError

SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
"""Fields of HFModelConfig that Megatron's config has too."""


def build_model(
    hf: HFModelConfig, actor: ActorConfig, dtype: str, device: DeviceChoice, *, upcasts_head: bool = False
) -> list[GPTModel]:
    """The model chunks of this rank, one a virtual pipeline stage, weights not yet set (see `weights.load_hf_weights`).

    `dtype` is "float32" or "bfloat16". The process groups must be up (`process_groups.initialise`). The chunks have a
    vocabulary padded to a multiple of the tensor-parallel size: the logits' columns from `hf.vocab_size` on mean
    nothing. Under `actor.fused_linear_log_prob` the last stage's output is hidden states instead of logits; so it is
    where the head is upcast, in float32.

    Raises:
        ConfigError: the layout does not divide the model, or its experts cannot be computed here.
    """
    config = transformer_config(hf, actor, dtype, device)
    inverse_frequencies = hf.inverse_frequencies().to(device.device)
    virtual = actor.layout.virtual_pipeline
    chunks = []
    for vp_stage in [None] if virtual is None else range(virtual):
        if device.transformer_engine:
            # Megatron applies the rotary embedding.
            experts = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
            norms = {"qk_layernorm": config.qk_layernorm}
            spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**experts, **norms)
        else:
            spec = local_spec(config, rotary=Rotary(inverse_frequencies), vp_stage=vp_stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=round_up(hf.vocab_size, actor.layout.tensor),
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
        if (actor.fused_linear_log_prob or upcasts_head) and chunk.post_process:
            chunk.output_layer = HiddenStatesOutput.of(chunk.output_layer, upcasts_head)
        if hf.experts is not None:
            chunk.to(device.device)  # Megatron makes a router's weight on the CPU
            routing_replay.install(chunk)
        chunks.append(chunk)
    return chunks


def transformer_config(hf: HFModelConfig, actor: ActorConfig, dtype: str, device: DeviceChoice) -> TransformerConfig:
    """Megatron's config: the model, the layout, the precision, and the fusions that the device has."""
    layout = actor.layout
    check_actor(hf, actor)
    cuda, torch_dtype = device.device.type == "cuda", getattr(torch, dtype)
    return TransformerConfig(
        **{name: getattr(hf, name) for name in SIZES},
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
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        apply_rope_fusion=device.transformer_engine,
        gradient_accumulation_fusion=device.gradient_accumulation,
        fp8=None if actor.fp8 == "none" else actor.fp8,
        fp8_recipe=actor.fp8_recipe,
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=True,
        # Batched point-to-point calls give wrong gradients with virtual stages over gloo.
        overlap_p2p_comm=layout.virtual_pipeline is not None and actor.overlap is not False,
        batch_p2p_comm=layout.virtual_pipeline is None,
        batch_p2p_sync=False,  # the whole device would wait at each of them, for a fault of old PyTorch
        **_expert_settings(hf, layout, device),
        **_recompute_settings(actor.recompute, device),
    )


def _recompute_settings(recompute: Recompute, device: DeviceChoice) -> dict[str, Any]:
    """Megatron's words for `actor.recompute`."""
    if recompute == "none":
        return {}
    if isinstance(recompute, tuple):
        if "layernorm" in recompute and not device.transformer_engine:  # Megatron's recompute calls it by name
            raise ConfigError("actor.recompute: layernorm: needs TransformerEngine; leave it out")
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute)}
    method, layers = ("uniform", 1) if recompute == "full" else ("block", recompute)
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def _expert_settings(hf: HFModelConfig, layout: LayoutConfig, device: DeviceChoice) -> dict[str, Any]:
    """Of a mixture of experts: no token is dropped, and nothing but the objective has a gradient."""
    experts = hf.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        # A softmax over the chosen experts alone is one over all of them, normalised afterwards.
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": device.transformer_engine,
        # The other way a token's experts are summed in the weights' type and in no fixed order.
        "moe_permute_fusion": device.transformer_engine,
    }


def local_spec(config: TransformerConfig, *, rotary: Rotary, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Megatron's spec of local layers with our norms and our attention, which also applies the rotary embedding."""
    norms: dict[str, Any] = {"qk_layernorm": config.qk_layernorm, "normalization": "RMSNorm"}
    layer = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=config.num_moe_experts, **norms)
    if config.num_moe_experts is not None:
        # In a checkpoint the norm before experts has its own name, as TransformerEngine's layers do not fuse it.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = partial(PackedAttention, rotary=rotary)
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension; the mean of squares is taken in float32, as Hugging Face does.

    Megatron's own has no sequence-parallel mark."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each tensor-parallel rank sees a part of the tokens: by this mark Megatron sums the
        # gradients of this weight over those ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] in, the same shape and type out."""
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """With n(x) = x / rms(x), G the gradient of the output and g = G * weight:

        d/d weight = sum over rows of G * n        d/d x = (g - n * mean(g * n)) / rms(x)

    Written out it keeps the input and one number a row, where autograd keeps four tensors of the input's size, and goes
    over memory half as often.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, inverse)
        # A new tensor in any type, which nothing else holds.
        return (wide * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, grad = x.float() * inverse, grad.float()
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        mean = (product @ (weight.float() / weight.numel())).unsqueeze(-1)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class HiddenStatesOutput(ColumnParallelLinear):
    """Megatron's output layer without its product: it hands on hidden states, and the loss multiplies by its weight
    block by block (`log_prob.linear_token_log_probs`). Parameter, name and sharded checkpoint are those of the layer
    that it replaces."""

    upcasts = False

    @classmethod
    def of(cls, layer: ColumnParallelLinear, upcasts: bool) -> "HiddenStatesOutput":
        """In the place of `layer`, with its weight (none where that is the embedding's)."""
        given = {"config": layer.config, "init_method": layer.config.init_method, "tp_group": layer.tp_group}
        output = cls(layer.input_size, layer.output_size, **given, bias=False, skip_weight_param_allocation=True)
        output.weight, output.upcasts = layer.weight, upcasts
        return output

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Hidden states [s, b, h], whole on every tensor-parallel rank; backward sums the ranks' gradients, of upcast
        ones in float32."""
        input_ = input_.float() if self.upcasts else input_
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        return mappings.copy_to_tensor_model_parallel_region(input_, group=self.tp_group), None


def output_weight(chunk: torch.nn.Module) -> Tensor | None:
    """[V / tp, h] of the last pipeline stage's last chunk (wrapped or not): the output layer's weight, or the
    embedding's that it is tied to. None where the chunk's output is logits already."""
    model = get_attr_wrapped_model(chunk, "output_layer", return_model_obj=True)
    if not isinstance(model.output_layer, HiddenStatesOutput):
        return None
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight
