"""Moments, master weights and step counts of Megatron's optimizers as shards that fit any layout.

The plain optimizer's state has the shape of the weights, and Megatron shards it like them. The distributed optimizer's
lies in flat buffers cut over the data-parallel ranks, wherever the cut falls in a weight. Megatron's way to make that
fit any layout (`fully_reshardable`) gathers the state of a model-parallel group on its first data-parallel rank, which
copies and writes for all; in 0.16 and 0.19 it also takes a neighbour's moments behind the first padded bucket. Here a
rank gathers nothing: its part of a weight, a range of flat numbers, is at most three rectangles of that weight (rest of
a row, whole rows, begin of a row), each a shard of its own. What is stored is the same tensors under the same names.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

NAMES = ("param", "exp_avg", "exp_avg_sq")
"""Master weight, first and second moment."""

GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells parameter groups apart. Megatron's `param_group_identifier_keys` also hold in 0.19 what a resumed run may
set anew, such as the learning rate's bounds, and keys that a group may lack."""


def sharded_optimizer_state(
    optimizer: ChainedOptimizer, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
) -> dict[str, Any]:
    """What `dist_checkpointing` saves, or with `loading` what it fills; then `load_optimizer_state` takes it.

    Args:
        model_state: the model's sharded state dict, of the same parameters.
        metadata: the one that made `model_state`.
    """
    inner = _inner(optimizer)
    # Zeros before the first step: a checkpoint holds the same entries at any time.
    inner.init_state_fn(inner.optimizer, inner.config)
    if not isinstance(inner, DistributedOptimizer):
        return inner.sharded_state_dict(model_state, loading, metadata)
    places, _ = extract_sharded_tensors_and_factories(model_state)
    place_of = {place.data: place for place in nested_values(places)}
    return inner.state_dict() | {
        "param_state": {
            number: {name: dict(enumerate(_pieces(place_of[parameter], name, begin, own[name]))) for name in NAMES}
            for number, (parameter, begin, own) in enumerate(_own_ranges(inner))
        }
    }


def load_optimizer_state(optimizer: ChainedOptimizer, state: dict[str, Any]) -> None:
    """Take over what was filled.

    The distributed optimizer's tensors are filled where they lie, so only the values of its parameter groups are left,
    the step count among them. Its own `load_state_dict` would hold all of them twice, with TransformerEngine's
    FusedAdam three times.
    """
    inner = _inner(optimizer)
    if not isinstance(inner, DistributedOptimizer):
        optimizer.load_state_dict(state)
        return
    stored = {_identity(group): group for group in state["optimizer"]["param_groups"]}
    assert len(stored) == len(inner.optimizer.param_groups), "two parameter groups that GROUP_KEYS do not tell apart"
    for group in inner.optimizer.param_groups:
        group.update({name: value for name, value in stored[_identity(group)].items() if name != "params"})


def rectangles(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, size) of the fewest blocks that hold the numbers `begin` .. `end` of a row-major array, in their order.

    (4, 10), 7 .. 32 is ((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 2)).
    """
    if begin == end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(begin, row), divmod(end, row)
    if skipped:
        for offset, size in rectangles(shape[1:], skipped, row if first < last else rest):
            yield (first, *offset), (1, *size)
        first += 1
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if rest and first <= last:
        for offset, size in rectangles(shape[1:], 0, rest):
            yield (last, *offset), (1, *size)


def _own_ranges(
    optimizer: DistributedOptimizer,
) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
    """In Megatron's order: a weight, where this rank's part of it begins, and the flat state of that part."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    own = optimizer._get_main_param_and_optimizer_states(parameter)
                    yield parameter, ranges["param"].start, {name: own[name] for name in NAMES}


def _pieces(
    shard: ShardedTensor | ShardedTensorFactory, name: str, begin: int, values: torch.Tensor
) -> Iterator[ShardedTensor]:
    """`values`, flat, of a weight from its number `begin` on, as blocks of the whole model's tensor.

    Args:
        shard: the weight's place; a factory, where Megatron cuts the weight (gate and up projection) into several.
    """
    key, end, done = f"optimizer.state.{name}.{shard.key}", begin + values.numel(), 0
    # Without numbers: only where each part begins in the weight is asked for.
    whole = torch.empty_like(shard.data, device="meta")
    for part in _parts(replace(shard, key=key, data=whole)):
        assert part.data is not None
        assert part.data.is_contiguous(), f"{key}: not cut along its first axis"
        start, prepended = part.data.storage_offset(), part.prepend_axis_num
        inside = (min(max(at - start, 0), part.data.numel()) for at in (begin, end))
        for offset, size in rectangles(part.local_shape, *inside):
            block = values[done : done + math.prod(size)].detach()
            done += block.numel()
            local_shape = (*[1] * prepended, *size)
            global_offset = [at + more for at, more in zip(part.global_offset[prepended:], offset, strict=True)]
            yield replace(
                part,
                data=block.view(local_shape),
                dtype=values.dtype,
                local_shape=local_shape,
                global_offset=(*part.global_offset[:prepended], *global_offset),
                axis_fragmentations=None,
                prepend_axis_num=0,
                replica_id=(*part.replica_id[:2], 0),  # among data-parallel ranks nobody else has this block
            )
    assert done == values.numel(), f"{key}: the parts hold {done} of {values.numel()} numbers"


def _parts(shard: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    return [shard] if isinstance(shard, ShardedTensor) else list(nested_values(shard.build()))


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells Megatron's parameter groups apart, in whatever order they come."""
    return tuple(group.get(name) for name in GROUP_KEYS)


def _inner(optimizer: ChainedOptimizer) -> Any:
    (inner,) = optimizer.chained_optimizers
    return inner
