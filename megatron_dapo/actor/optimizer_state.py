"""Moments, master weights and step counts of Megatron's optimizers as shards that fit any layout.

The plain optimizer's state has the shape of the weights, and Megatron shards it like them. The distributed optimizer's
lies in flat buffers cut over the data-parallel ranks; it is gathered and cut into the weights' shapes again (Megatron's
`fully_reshardable` format). Megatron's own version of that step takes offsets that count the padding at the end of each
bucket into a gathered buffer that does not have it: behind the first padded bucket the moments are a neighbour's (0.16
and 0.19; at most a warning in the log). So that step is written here; loading and everything else is Megatron's.
"""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

FORMAT = "fully_reshardable"


def sharded_optimizer_state(
    optimizer: ChainedOptimizer, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
) -> dict[str, Any]:
    """What `dist_checkpointing` saves, or with `loading` what it fills; for `optimizer.load_state_dict`.

    Collective. On saving the gathered state of a model-parallel group is on the CPU of its first data-parallel rank.

    Args:
        model_state: the model's sharded state dict, of the same parameters.
        metadata: the one that made `model_state`.
    """
    (inner,) = optimizer.chained_optimizers
    # Zeros before the first step: a checkpoint holds the same entries at any time.
    inner.init_state_fn(inner.optimizer, inner.config)
    if not isinstance(inner, DistributedOptimizer):
        return inner.sharded_state_dict(model_state, loading, metadata)
    state = inner.state_dict()
    state["param_state"] = _shards(inner, model_state, loading=loading)
    state["param_state_sharding_type"] = FORMAT
    return state


def _shards(
    optimizer: DistributedOptimizer, model_state: dict[str, Any], *, loading: bool
) -> dict[int, dict[str, ShardedTensor | ShardedTensorFactory]] | None:
    """By number of the parameter, as Megatron counts: shards of `param`, `exp_avg` and `exp_avg_sq` in its shape.
    None on ranks that have nothing to save."""
    gathered = optimizer.get_parameter_state_dp_zero(empty_data=loading, return_on_all_ranks=loading)
    if gathered is None:
        return None
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    shard_of = {shard.data: shard for shard in nested_values(sharded)}
    shards: dict[int, dict[str, ShardedTensor | ShardedTensorFactory]] = {}
    for index, buffer in enumerate(optimizer.buffers):
        (flat,) = gathered[index].values()
        for parameter, (start, end, bucket) in buffer.param_index_map.items():
            padding = buffer.buckets[bucket].offset - sum(b.numel_unpadded for b in buffer.buckets[:bucket])
            shards[len(shards)] = {
                name: _like(shard_of[parameter], name, values[start - padding : end - padding])
                for name, values in flat.items()
                if isinstance(values, torch.Tensor)
            }
    return shards


def _like(
    shard: ShardedTensor | ShardedTensorFactory, name: str, values: torch.Tensor
) -> ShardedTensor | ShardedTensorFactory:
    """The place of a weight in the whole model, with other numbers and another key."""
    fields: dict[str, Any] = {"key": f"optimizer.state.{name}.{shard.key}", "data": values.view(shard.data.shape)}
    if isinstance(shard, ShardedTensor):
        fields["dtype"] = values.dtype
    return replace(shard, **fields)
