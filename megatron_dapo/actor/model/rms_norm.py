"""RMSNorm in PyTorch for the local layer spec; Megatron's own has no sequence-parallel mark."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension; the mean of squares is taken in float32, as Hugging Face does."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each tensor-parallel rank sees a part of the tokens: by this mark Megatron sums the
        # gradients of this weight over those ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] in, the same shape and type out."""
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """With n(x) = x / rms(x), G the gradient of the output and g = G * weight:

        d/d weight = sum over rows of G * n        d/d x = (g - n * mean(g * n)) / rms(x)

    Written out it keeps the input and one number a row, where autograd keeps four tensors of the input's size, and goes
    over memory half as often.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, inverse)
        # A new tensor in any type, which nothing else holds.
        return (wide * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, grad = x.float() * inverse, grad.float()
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        mean = (product @ (weight.float() / weight.numel())).unsqueeze(-1)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
