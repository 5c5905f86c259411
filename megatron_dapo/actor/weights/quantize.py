"""FP8 weights for the servers, in the layout of block-wise FP8 checkpoints (DeepSeek-V3, arXiv 2412.19437).

Every projection `*_proj.weight`, an expert's too, becomes float8_e4m3fn [out, in] with a float32 scale
`*_proj.weight_scale_inv` [out / 128, in / 128] for each block of 128 x 128: weight = FP8 x scale. Embedding, output
layer, norms, biases and router keep their type.

Scales are powers of two: the product is then exact in bfloat16, in which SGLang's weight checker hashes it, and the
rounding is that of the format alone, to 4 significant bits. It costs at most one of the format's 18 powers of two.
"""

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from megatron_dapo.actor.model.hf_config import BLOCK

SCALE = "_scale_inv"
"""Behind a weight's name: its scales."""
_LEAST_EXPONENT = -100
"""Of a scale: a block of smaller weights becomes zeros."""


def quantized_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """With the scales, each behind its weight."""
    with_scales = {}
    for name, shape in shapes.items():
        with_scales[name] = shape
        if name.endswith("_proj.weight"):
            with_scales[name + SCALE] = (shape[0] // BLOCK, shape[1] // BLOCK)
    return with_scales


def stored_dtype(name: str, names: Container[str], dtype: torch.dtype) -> torch.dtype:
    """Type of a tensor among `names`; `dtype`: of those that are not quantized."""
    return torch.float32 if name.endswith(SCALE) else torch.float8_e4m3fn if name + SCALE in names else dtype


def quantized(tensors: Mapping[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """The tensors as they are stored; those whose scales are among `names` are quantized, where they are."""
    stored = {}
    for name, tensor in tensors.items():
        if name + SCALE in names:
            stored[name], stored[name + SCALE] = quantize(tensor)
        else:
            stored[name] = tensor
    return stored


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [out, in], float32 [out / 128, in / 128]) of a bfloat16 or float32 weight, whose sizes are
    multiples of 128.

    A block's scale is the least power of two above its largest magnitude / 448, the largest number of the format.
    """
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = blocks.abs().amax((1, 3)).float()
    exponent = torch.frexp(largest / torch.finfo(torch.float8_e4m3fn).max).exponent.clamp(min=_LEAST_EXPONENT)
    scale = ((exponent + 127) << 23).view(torch.float32)  # 2 ** exponent, exactly, on every device
    scaled = blocks / scale.to(weight.dtype)[:, None, :, None]
    return scaled.to(torch.float8_e4m3fn).flatten(2).flatten(0, 1), scale
