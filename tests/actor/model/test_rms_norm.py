"""RMSNorm, whose backward is written out, against the formula and autograd in float64."""

import pytest
import torch

from megatron_dapo.actor.device import prepare

prepare("cpu")

from megatron_dapo.actor.model.model_chunks import RMSNorm  # noqa: E402  (Megatron may be imported only after `prepare`)


def norm(size: int, dtype: torch.dtype) -> RMSNorm:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=size, num_attention_heads=1, params_dtype=dtype, use_cpu_initialization=True
    )
    module = RMSNorm(config, size, eps=1e-3)
    torch.nn.init.normal_(module.weight)
    return module


@pytest.mark.parametrize("shape", [(5, 1, 48), (7, 3, 8), (4, 6)])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_values_and_gradients_are_those_of_the_formula(shape, dtype, near):
    torch.manual_seed(sum(shape))
    module = norm(shape[-1], dtype)
    x, upstream = (torch.randn(shape).to(dtype) for _ in range(2))
    # A small row, in which epsilon counts.
    x[0] *= 0.01
    x.requires_grad_()
    got = module(x)
    gradients = torch.autograd.grad(got, (x, module.weight), upstream)
    assert got.dtype == gradients[0].dtype == gradients[1].dtype == dtype

    wide, weight = x.detach().double().requires_grad_(), module.weight.detach().double().requires_grad_()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    references = torch.autograd.grad(wanted, (wide, weight), upstream.double())
    for ours, reference in zip((got, *gradients), (wanted, *references), strict=True):
        assert (ours.double() - reference).norm() <= near * reference.norm()
