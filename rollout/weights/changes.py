"""Only what changed since the last weight version: how a bucket's changed values travel, and the loader with which a
server of `--custom-weight-loader` takes them.

SGLang calls `load` in each of its ranks. It receives the changes in the process group that SGLang has made for weights,
and gives the model's own loaders, which fuse and shard, whole tensors that are NaN wherever nothing changed. While they
run, a copy into the model leaves out the NaN.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = 1 << 24
"""Values that are compared or put in place at a time, so that what this takes besides is small beside a bucket."""

_POWERS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def encode(values: Tensor, before: Tensor) -> tuple[Tensor, list[int]] | None:
    """What makes `values` of `before`, bit by bit; None where the whole is better sent: the changes are more than half
    of its bytes, or one of them is NaN.

    Args:
        values: [n], bfloat16, float16 or float32.
        before: [n], of the same type, on any device.

    Returns:
        uint8 on the device of `values`: the changed values, then a bit for each value, the first one lowest; and how
        many of each `BLOCK` values changed.
    """
    integer = torch.int16 if values.itemsize == 2 else torch.int32
    changed, bits, powers = list[Tensor](), list[Tensor](), _POWERS.to(values.device)
    for now, old in zip(values.split(BLOCK), before.split(BLOCK), strict=True):
        differs = now.view(integer) != old.to(now.device, non_blocking=True).view(integer)
        changed.append(now[differs])
        bits.append((pad(differs, (0, -differs.numel() % 8)).view(-1, 8) * powers).sum(1, dtype=torch.uint8))
        if 2 * sum(each.nbytes for each in changed + bits) > values.nbytes:
            return None
    joined = torch.cat(changed)
    if joined.isnan().any():
        return None
    return torch.cat([joined.view(torch.uint8), *bits]), [each.numel() for each in changed]


def decode(data: Tensor, counts: Sequence[int], size: int, dtype: torch.dtype) -> Tensor:
    """[size], with what `encode` has made: NaN where nothing changed."""
    changed, bits = data.split([sum(counts) * dtype.itemsize, -(-size // 8)])
    values = torch.full([size], torch.nan, dtype=dtype, device=data.device)
    parts, powers = changed.view(dtype).split(list(counts)), _POWERS.to(data.device)
    for block, packed, part in zip(values.split(BLOCK), bits.split(BLOCK // 8), parts, strict=True):
        block.masked_scatter_((packed[:, None] & powers).bool().view(-1)[: block.numel()], part)
    return values


class _OnlyChanges(TorchDispatchMode):
    """Under it no copy brings a NaN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            into, source = args[0], args[1].to(args[0])
            args = into, torch.where(source.isnan(), into, source)
        return func(*args, **(kwargs or {}))


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Receives the changes of a bucket and loads them.

    Args:
        model: SGLang's.
        named_tensors: one, an empty tensor of uint8 on the model's device. Its name says as JSON what comes: the
            `group`'s name, the `dtype`, (name, shape) of the `tensors`, the number of `bytes`, and `counts` (`encode`).
    """
    [(text, empty)] = named_tensors
    told = json.loads(text)
    data = empty.new_empty(told["bytes"])
    dist.broadcast(data, group=distributed_c10d._resolve_process_group(told["group"]), group_src=0)
    sizes = [math.prod(shape) for _, shape in told["tensors"]]
    parts = decode(data, told["counts"], sum(sizes), getattr(torch, told["dtype"])).split(sizes)
    del data  # what copies take is beside the whole tensors alone
    with _OnlyChanges():
        whole = zip(told["tensors"], parts, strict=True)
        model.load_weights([(name, part.view(shape)) for (name, shape), part in whole])
