"""Routing of a mixture of experts: replayed, and counted.

Replay (R3, arXiv 2510.11370): each token goes to the experts that the servers sent it to.

The probabilities are the trainer's own, of those experts, so that the router's gradient flows through them. Rounding
otherwise sends some tokens to other experts than in the engine, and again to others after an update.

Megatron asks `router.router_replay` for the experts of each token; an object of ours stands there. A layer is called
with its micro-batch's sequences, in forward and again where it is recomputed, whatever the pipeline's schedule does in
between: a hook takes the layer's rows from them.

Counts are added up on the device, in the passes that ask for them (`PackedSequences.counts`), which have no recompute.
Each token is on one rank of each layer's: the ranks' sum is exact.

T tokens of a context-parallel rank's row, t of them on this tensor-parallel rank, E experts, k of them a token.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_dapo.actor.step_data import ROUTER_SUMS


class LayerRouting:
    """The experts of one layer's tokens."""

    def __init__(self, layer: TransformerLayer) -> None:
        self._layer: int = layer.layer_number - 1
        self._parts = parallel_state.get_tensor_model_parallel_world_size()
        self._part = parallel_state.get_tensor_model_parallel_rank()
        self._softmaxed = layer.config.moe_router_pre_softmax
        self._experts: Tensor | None = None
        """int64 [t, k]; None: the router's own choice."""
        self._counts: tuple[Tensor, Tensor] | None = None
        """Of this layer, [E + 3]; and which tokens they count, [t] of 0 and 1; float64. None: nobody counts."""

    def take(self, layer: TransformerLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward of the layer. Sequence parallelism, which experts need under tensor parallelism, cuts the
        row into equal parts."""
        sequences = kwargs["packed_seq_params"]
        routing, counted = sequences.routing, sequences.counted
        self._experts = None if routing is None else self._own_part(routing[:, self._layer]).long()
        self._counts = None if counted is None else (sequences.counts[self._layer], self._own_part(counted))

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, own: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Called by Megatron's router. scores [t, E], logits or probabilities -> those of the chosen experts, and
        these, [t, k] each."""
        experts, asked = self._experts, (scores, topk, num_groups, group_topk)
        values, chosen = own(*asked) if experts is None else (scores.gather(1, experts), experts)
        if self._counts is not None:
            wanted = chosen if experts is None else own(*asked)[1]
            self._count(scores, chosen, wanted, *self._counts)
        return values, chosen

    def _count(self, scores: Tensor, chosen: Tensor, wanted: Tensor, counts: Tensor, counted: Tensor) -> None:
        """`wanted`: the router's own choice."""
        counts.scatter_add_(0, chosen.flatten(), counted[:, None].expand_as(chosen).flatten())
        entropy = torch.special.entr(scores if self._softmaxed else scores.softmax(-1)).sum(-1)
        otherwise = chosen.sort(-1).values.ne(wanted.sort(-1).values).any(-1)
        counts[-ROUTER_SUMS:] += torch.stack([torch.ones_like(counted), entropy, otherwise]) @ counted

    def _own_part(self, rows: Tensor) -> Tensor:
        return rows.chunk(self._parts)[self._part]


def install(chunk: torch.nn.Module) -> None:
    """Let the layers of a model chunk take their experts from `PackedSequences.routing`, and count."""
    for layer in chunk.modules():
        if isinstance(layer, TransformerLayer):
            layer.mlp.router.router_replay = routing = LayerRouting(layer)
            layer.register_forward_pre_hook(routing.take, with_kwargs=True)
