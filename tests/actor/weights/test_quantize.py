"""FP8 weights against a float64 transcription of the format, which knows nothing of torch's conversion."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dapo.actor.model.hf_config import HFModelConfig, check_blocks
from megatron_dapo.actor.weights.quantize import quantize, quantized, quantized_shapes, stored_dtype
from megatron_dapo.config import ConfigError

LARGEST, LEAST_NORMAL, SPACING_BELOW = 448.0, 2.0**-6, 2.0**-9
"""Of E4M3 (OCP specification): 4 bits of exponent with bias 7, 3 of mantissa, the last code is no number."""


def numbers() -> np.ndarray:
    """float64 [127]: every number that is not negative, at the index that is its code."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * SPACING_BELOW, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def nearest(values: np.ndarray) -> np.ndarray:
    """uint8 codes of the nearest numbers, of two the even one."""
    table = numbers()
    above = np.searchsorted(table, np.abs(values)).clip(0, 126)
    below = (above - 1).clip(0)
    left, right = np.abs(values) - table[below], table[above] - np.abs(values)
    code = np.where((left < right) | ((left == right) & (below % 2 == 0)), below, above)
    return (code | (np.signbit(values) << 7)).astype(np.uint8)


def reference(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of a float64 weight, block by block."""
    codes, scales = np.empty(weight.shape, np.uint8), np.empty([size // 128 for size in weight.shape])
    for row, column in np.ndindex(*scales.shape):
        at = slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1))
        scale = 2.0**-140
        while scale <= np.abs(weight[at]).max() / LARGEST:
            scale *= 2
        scales[row, column] = scale
        codes[at] = nearest(weight[at] / scale)
    return codes, scales


def weights(dtype: torch.dtype) -> torch.Tensor:
    """[384, 256] with blocks of very different sizes."""
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(384, 256, generator=draw) * 0.02
    weight[:128, 128:] *= 1e-3
    weight[128:256, :128] *= 1e4
    weight[200, 100] = 448.0
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_numbers_are_those_of_the_format(dtype: torch.dtype) -> None:
    weight = weights(dtype)
    stored, scale = quantize(weight)
    codes, scales = reference(weight.double().numpy())
    assert (stored.shape, stored.dtype, scale.dtype) == (weight.shape, torch.float8_e4m3fn, torch.float32)
    np.testing.assert_array_equal(scale.numpy(), scales)
    np.testing.assert_array_equal(stored.view(torch.uint8).numpy(), codes)


def test_the_product_is_near_and_exact_in_bfloat16() -> None:
    weight = weights(torch.bfloat16)
    stored, scale = quantize(weight)
    spread = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    product = stored.double() * spread
    error, size = (product - weight.double()).abs(), weight.double().abs()
    assert bool((error <= torch.where(size >= LEAST_NORMAL * spread, size / 16, SPACING_BELOW * spread / 2)).all())
    assert float(error.max()) > 0
    assert torch.equal(product.bfloat16().double(), product), "what a server's checksum is made of is the product"
    again, same_scale = quantize(product.bfloat16())
    assert torch.equal(
        again.double() * same_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1), product
    )


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-36, 2e-36, -3e-33])
def test_a_block_of_nothing_is_no_nan(value: float) -> None:
    stored, scale = quantize(torch.full((128, 128), value, dtype=torch.bfloat16))
    product = stored.double() * scale.double()
    assert bool(product.isfinite().all())
    assert math.isclose(float(product[0, 0]), value, rel_tol=0.1, abs_tol=2.0**-110)


def test_only_projections_are_quantized() -> None:
    names = {"model.embed_tokens.weight": (256, 128), "a.self_attn.q_proj.weight": (256, 128)}
    names |= {"a.self_attn.q_proj.bias": (256,), "a.mlp.gate.weight": (8, 128), "a.q_norm.weight": (64,)}
    names |= {"a.mlp.experts.7.down_proj.weight": (128, 384), "lm_head.weight": (256, 128)}
    shapes = quantized_shapes(names)
    scales = {"a.self_attn.q_proj.weight_scale_inv": (2, 1), "a.mlp.experts.7.down_proj.weight_scale_inv": (1, 3)}
    assert shapes == names | scales
    assert list(shapes)[1:3] == ["a.self_attn.q_proj.weight", "a.self_attn.q_proj.weight_scale_inv"]
    tensors = quantized({name: torch.randn(shape).bfloat16() for name, shape in names.items()}, shapes)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    for name, tensor in tensors.items():
        assert tensor.dtype == stored_dtype(name, shapes, torch.bfloat16), name
    plain = {"a.self_attn.q_proj.weight": torch.randn(256, 128)}
    assert quantized(plain, names) == plain


QWEN_32B = {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_key_value_heads": 8}
QWEN_HALF_B = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
QWEN3_30B_A3B = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
QWEN3_30B_A3B |= {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@pytest.mark.parametrize(
    ("kind", "shape", "ranks", "refused"),
    [
        ("qwen2", QWEN_32B, 8, None),
        ("qwen2", QWEN_HALF_B, 1, None),
        ("qwen2", QWEN_HALF_B, 2, "query size 896 over 2"),
        ("qwen3_moe", QWEN3_30B_A3B, 2, None),
        ("qwen3_moe", QWEN3_30B_A3B, 4, "intermediate size 768 over 4"),
        ("qwen2", QWEN_32B | {"hidden_size": 5000, "head_dim": 128}, 1, "hidden size 5000"),
        (
            "qwen2",
            QWEN_32B | {"num_key_value_heads": 10, "num_attention_heads": 80},
            2,
            "key and value size 640 over 2",
        ),
    ],
)
def test_a_share_that_would_cut_a_block_is_refused(
    tmp_path: Path, kind: str, shape: dict, ranks: int, refused: str | None
) -> None:
    import transformers

    name = {"qwen2": "Qwen2Config", "qwen3_moe": "Qwen3MoeConfig"}[kind]
    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[kind]
    more = {"norm_topk_prob": True} if kind == "qwen3_moe" else {}
    getattr(transformers, name)(architectures=[architecture], **shape, **more).save_pretrained(tmp_path)
    hf = HFModelConfig.load(tmp_path)
    check_blocks(hf, "none", ranks)
    if refused is None:
        check_blocks(hf, "fp8", ranks)
        return
    with pytest.raises(ConfigError, match=refused) as caught:
        check_blocks(hf, "fp8", ranks)
    assert ("lower rollout.tensor_parallel" in str(caught.value)) is (ranks > 1 and "hidden" not in refused)
