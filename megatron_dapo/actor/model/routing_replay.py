"""Routing replay (R3, arXiv 2510.11370): each token goes to the experts that the servers sent it to.

The probabilities are the trainer's own, of those experts, so that the router's gradient flows through them. Rounding
otherwise sends some tokens to other experts than in the engine, and again to others after an update.

Megatron asks `router.router_replay` for the experts of each token; an object of ours stands there. A layer is called
with its micro-batch's sequences, in forward and again where it is recomputed, whatever the pipeline's schedule does in
between: a hook takes the layer's rows from them.

T tokens of a context-parallel rank's row, t of them on this tensor-parallel rank, k experts a token.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class LayerRouting:
    """The experts of one layer's tokens."""

    def __init__(self, layer: TransformerLayer) -> None:
        self._layer: int = layer.layer_number - 1
        self._parts = parallel_state.get_tensor_model_parallel_world_size()
        self._part = parallel_state.get_tensor_model_parallel_rank()
        self._experts: Tensor | None = None
        """int64 [t, k]; None: the router's own choice."""

    def take(self, layer: TransformerLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward of the layer. Sequence parallelism, which experts need under tensor parallelism, cuts the
        row into equal parts."""
        routing = kwargs["packed_seq_params"].routing
        self._experts = None if routing is None else routing[:, self._layer].chunk(self._parts)[self._part].long()

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, own: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Called by Megatron's router. scores [t, experts] -> those of the chosen experts, and these, [t, k] each."""
        if self._experts is None:
            chosen: tuple[Tensor, Tensor] = own(scores, topk, num_groups, group_topk)
            return chosen
        return scores.gather(1, self._experts), self._experts


def install(chunk: torch.nn.Module) -> None:
    """Let the layers of a model chunk take their experts from `PackedSequences.routing`."""
    for layer in chunk.modules():
        if isinstance(layer, TransformerLayer):
            layer.mlp.router.router_replay = routing = LayerRouting(layer)
            layer.register_forward_pre_hook(routing.take, with_kwargs=True)


def check_routing(routing: np.ndarray, config: TransformerConfig) -> None:
    """Raise ValueError unless uint8 [tokens, layers, k] is of this model's sizes."""
    wanted, experts = (config.num_layers, config.moe_router_topk), config.num_moe_experts or 0
    if routing.shape[1:] != wanted or routing.max(initial=0) >= experts:
        raise ValueError(
            f"routing of {routing.shape[1:]} layers and experts a token, with expert {routing.max(initial=0)}: the "
            f"model has {wanted} and experts 0 .. {experts - 1}"
        )
