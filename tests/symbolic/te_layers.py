"""TransformerEngine without its compiled parts: its own Python over stand-ins of the kernels that our layers call.

What it builds, saves for backward, gathers and reduces is its own code. A stand-in only makes what the kernel returns,
in the shapes that TransformerEngine's C++ gives it: RMSNorm with one inverse deviation a row, matrix products, rotary
embedding, packed attention by cuDNN with its statistics [tokens, heads, 1] and random state, Adam, scaling and norms.
A kernel without a stand-in is a mock: its results carry no shape, and the trace ends where one is used.
"""

import enum
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from megatron_dapo.config import ConfigError

_TYPES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
_TORCH_TYPES = {2: torch.float32, 3: torch.float16, 4: torch.bfloat16}


def install() -> None:
    """Make TransformerEngine importable; call before Megatron is imported.

    Raises:
        ConfigError: its Python is not installed.
    """
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        raise ConfigError("--layers te needs transformer-engine's Python (no GPU, no compiler); or give --layers local")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the core library is not loaded
    # Its kernels would be compiled for the GPU; as if it were not installed, cuDNN's attention is taken.
    sys.modules["flash_attn"] = None  # type: ignore[assignment]
    text = "\n".join(file.read_text() for file in sorted((Path(spec.origin).parent / "pytorch").rglob("*.py")))
    extension = MagicMock(
        name="transformer_engine_torch", __all__=sorted(set(re.findall(r"\b(?:tex|ext)\.(\w+)", text)))
    )
    make: Any = enum.IntEnum
    extension.DType = make("DType", _TYPES, start=0)
    for name in set(re.findall(r"\b(NVTE_[A-Z]\w+)\.NVTE_", text)):
        members = dict.fromkeys(re.findall(rf"\b{name}\.(NVTE_\w+)", text))
        setattr(extension, name, make(name, list(members), start=0))
    for name, kernel in _KERNELS.items():
        setattr(extension, name, kernel)
    extension.get_cudnn_version = lambda: 91900
    backend = extension.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    extension.get_fused_attn_backend = lambda *args: backend
    sys.modules["transformer_engine_torch"] = extension
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    class AttentionParams(utils.AttentionParams):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields | {"qkv_type": torch.Tensor})  # FakeTensor is no type that it knows

    utils.AttentionParams = AttentionParams


added_gradients: list[torch.Size] = []
"""Of the products that were added to a float32 buffer; `one_rank` notes those of other layers."""


def generic_gemm(a: Tensor, transa: bool, b: Tensor, transb: bool, *rest: Any, **options: Any) -> Any:
    """op(b) x op(a), as TransformerEngine's row-major layouts TN, NN and NT have it, and the bias's gradient."""
    out, _, out_dtype, bias, _, _, _, grad, *_, accumulate, _ = rest[:12]
    if out is not None and out.dtype == torch.float32 and accumulate:
        added_gradients.append(out.shape)
    if out is None:
        rows = (b.shape[-1],) if transb else b.shape[:-1]
        columns = a.shape[0] if transa else a.shape[-1]
        dtype = a.dtype if out_dtype is None else _TORCH_TYPES[int(out_dtype)]
        out = torch.empty((*rows, columns), dtype=dtype, device=a.device)
    bias_grad = torch.empty(b.shape[-1], dtype=bias.dtype, device=a.device) if grad and bias is not None else None
    return out, bias_grad, None, None


def rmsnorm_fwd(inp: Tensor, weight: Tensor, eps: float, out: Any, *rest: Any) -> tuple[Tensor, None, Tensor]:
    """Normalised input, no mean, float32 inverse deviation of each row."""
    rows = torch.empty(inp.numel() // inp.shape[-1], dtype=torch.float32, device=inp.device)
    return torch.empty_like(inp) if out is None else out, None, rows


def fused_attn_fwd(*args: Any) -> list[Tensor]:
    """Output [tokens, heads, size], statistics and random state, for packed sequences."""
    query, _, value = args[16:19]
    out = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
    statistics = torch.empty((*query.shape[:-1], 1), dtype=torch.float32, device=query.device)
    return [out, statistics, torch.empty(2, dtype=torch.int64, device=query.device)]


def multi_tensor_l2norm(chunk: int, flag: Tensor, lists: Any, per_tensor: bool = False, *rest: Any) -> Any:
    """Norm of all numbers, and of each tensor where asked."""
    each = torch.empty(len(lists[0]) if per_tensor else 0, dtype=torch.float32, device=flag.device)
    return torch.empty(1, dtype=torch.float32, device=flag.device), each


def _rotated(values: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


_KERNELS: dict[str, Callable[..., Any]] = {
    "generic_gemm": generic_gemm,
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": lambda grad, inp, deviations, weight, *rest: (torch.empty_like(inp), torch.empty_like(weight)),
    "fused_rope_forward": _rotated,
    "fused_rope_backward": _rotated,
    "fused_attn_fwd": fused_attn_fwd,
    "fused_attn_bwd": lambda *args: [*map(torch.empty_like, args[19:22]), None, None],
    "multi_tensor_l2norm": multi_tensor_l2norm,
}
