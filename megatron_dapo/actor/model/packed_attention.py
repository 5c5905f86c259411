"""Core attention of the local layer spec: rotary embedding and PyTorch's own attention on packed sequences.

Megatron's own local attention takes neither packed sequences nor context parallelism. Legend: t tokens on this
context-parallel rank, H query heads and G key/value heads on this tensor-parallel rank, D head size, B sequences of a
bucket.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_dapo.actor.model.packed_sequences import PackedSequences


class Rotary:
    """Cosines and sines of one micro-batch, kept for its layers: the embedding is the same in each of them."""

    def __init__(self, inverse_frequencies: Tensor):
        self.inverse_frequencies = inverse_frequencies
        self._last: tuple[PackedSequences, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, sequences: PackedSequences) -> Tensor:
        """Rotate [t, heads, D] by each token's position in its sequence."""
        if self._last is None or self._last[0] is not sequences or self._last[1].dtype != x.dtype:
            positions = sequences.plan.positions.to(torch.float32)
            angles = torch.outer(positions, self.inverse_frequencies.to(x.device))[:, None]
            self._last = (sequences, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        _, cos, sin = self._last
        return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """Each pair (x_i, x_{i + D/2}) turned by its angle; its gradient is turned back. cos and sin: [t, 1, D / 2]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to_first, to_second = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    return turned


class PackedAttention(MegatronModule):
    """Causal attention with grouped queries inside each sequence of a packed stream.

    Short sequences of similar length are computed as one padded batch, long ones by themselves (see `AttentionPlan`).
    Under context parallelism keys and values of the whole stream are gathered from the ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        rotary: Rotary,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        self.rotary = rotary
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.context_group = groups.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> Tensor:
        """query [t, H, D], key and value [t, G, D] -> [t, H * D]."""
        if not isinstance(packed_seq_params, PackedSequences) or attention_mask is not None:
            raise ValueError("give packed_seq_params from sequences.packed_sequences and no attention mask")
        plan = packed_seq_params.plan
        query, key = self.rotary(query, packed_seq_params), self.rotary(key, packed_seq_params)
        if self.context_group is not None:
            gathered = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), group=self.context_group)
            key, value = gathered.unbind(1)
        if plan.equal:
            batch = [x.unflatten(0, (len(plan.lengths), -1)) for x in (query, key, value)]
            return self._attend(*batch, mask=None)
        outputs = []
        if plan.alone:
            # One split for all: its backward is one concatenation, that of a slice each would be a full-sized sum each.
            parts = [x.split(plan.lengths) for x in (query, key, value)]
            outputs += [self._attend(*(part[i][None] for part in parts), mask=None) for i in plan.alone]
        for bucket in plan.buckets:
            outputs.append(self._attend(query[bucket.queries], key[bucket.keys], value[bucket.keys], mask=bucket.mask))
        output = torch.cat(outputs)
        return output if plan.slots is None else output.index_select(0, plan.slots)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
        """query [B, Lq, H, D], key and value [B, Lk, G, D] -> [B * Lq, H * D]; without a mask, plain causal."""
        if mask is not None:
            # On CUDA the kernel that takes a mask has no grouped queries.
            key, value = (x.repeat_interleave(query.size(2) // x.size(2), dim=2) for x in (key, value))
        output = scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.size(2) != key.size(2),
        )
        return output.transpose(1, 2).flatten(2).flatten(0, 1)
