"""The output layer under `actor.fused_linear_log_prob`: it hands on hidden states, and the loss multiplies by its
weight block by block (`logprob.linear_token_log_probs`)."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


class HiddenStatesOutput(ColumnParallelLinear):
    """Megatron's output layer without its product. Parameter, name and sharded checkpoint are those of the layer that
    it replaces."""

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
