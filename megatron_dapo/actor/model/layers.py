"""The modules of a model: TransformerEngine's layers on CUDA where it is installed, else Megatron's local ones with our
norm and attention; and the output layer of `actor.fused_linear_log_prob`."""

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dapo.actor.model.packed_attention import PackedAttention, Rotary


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

    @classmethod
    def of(cls, layer: ColumnParallelLinear) -> "HiddenStatesOutput":
        """In the place of `layer`, with its weight (none where that is the embedding's)."""
        output = cls(
            layer.input_size,
            layer.output_size,
            config=layer.config,
            init_method=layer.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=layer.tp_group,
        )
        output.weight = layer.weight
        return output

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Hidden states [s, b, h], whole on every tensor-parallel rank; backward sums the ranks' gradients."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(input_, group=self.tp_group), None
        return copy_to_tensor_model_parallel_region(input_, group=self.tp_group), None


def output_weight(chunk: torch.nn.Module) -> Tensor:
    """[V / tp, h] of the last pipeline stage's last chunk (wrapped or not): the output layer's weight, or the
    embedding's that it is tied to."""
    model: Any = chunk
    while not isinstance(model, GPTModel):
        model = model.module
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight
