"""How calls are described, so that ranks can compare them, and how they are made over gloo."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from tests.emulated.strict_board import StrictError

_AVG = "AVG"


def shapes(tensors: Sequence[torch.Tensor]) -> str:
    """`float32[3, 4] int64[1]`."""
    return " ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)


def op_name(op: Any) -> str:
    """`SUM` of ReduceOp.SUM, in either of its two spellings."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def op_of(opts: Any) -> Any:
    """The reduction of a call: its options, a bare ReduceOp, or the default."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def root_of(opts: Any) -> int:
    """The root of a call: its options, or a bare rank."""
    return opts if isinstance(opts, int) else int(opts.rootRank)


def digest(text: str) -> torch.Tensor:
    """int64 [1]; differs where the texts differ."""
    return torch.tensor([int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")])


def all_reduce(gloo: Any, tensor: torch.Tensor, op: Any) -> None:
    """In place. gloo has no mean, so it is the sum divided."""
    mean = op_name(op) == _AVG
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM if mean else op
    flat = tensor if tensor.is_contiguous() else tensor.contiguous()
    gloo.allreduce([flat], options).wait()
    if mean:
        flat.div_(gloo.size())
    if flat is not tensor:
        tensor.copy_(flat)


def all_gather(gloo: Any, outputs: Sequence[torch.Tensor], value: torch.Tensor) -> None:
    """`outputs[r]` of rank r's `value`; the memory of both may overlap."""
    got = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in outputs]
    gloo.allgather([got], [value.contiguous()]).wait()
    for output, part in zip(outputs, got, strict=True):
        output.copy_(part.view(output.shape))


def reduce_scatter(gloo: Any, output: torch.Tensor, values: Sequence[torch.Tensor], op: Any) -> None:
    """`output` is the reduction of all ranks' `values[own rank]`."""
    whole = torch.cat([value.reshape(-1) for value in values])
    all_reduce(gloo, whole, op)
    parts = whole.split([value.numel() for value in values])
    output.copy_(parts[gloo.rank()].view(output.shape))


def addmm(device: object, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """torch.addmm, with CUDA's result of another type than its factors."""
    total, *factors = args
    if (wanted := kwargs.pop("out_dtype", None)) is not None:
        if not (total.dtype == kwargs["out"].dtype == wanted == torch.float32 and factors[0].dtype == factors[1].dtype):
            raise StrictError(f"addmm of {[each.dtype for each in args]} gives no {wanted}")
        factors = [each.to(wanted) for each in factors]
    return func(total, *factors, **kwargs)
