"""Gradients of weights, added to their float32 buffers by the matrix product itself: in bfloat16 a product of its own
would round what each micro-batch adds.

TransformerEngine's layers do this themselves. Megatron's look for Apex's module of this kind, `NAME`, and call its
function; this module answers to that name.
"""

import torch
from torch import Tensor

NAME = "fused_weight_gradient_mlp_cuda"


def wgrad_gemm_accum_fp32(rows: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """main_grad += grad^T @ rows, calculated and summed in float32.

    Args:
        rows: [T, in], what the layer was given.
        grad: [T, out], the loss's gradient for what it gave, of the same type.
        main_grad: [out, in] float32.
    """
    if main_grad.is_cuda:
        torch.addmm(main_grad, grad.t(), rows, out_dtype=torch.float32, out=main_grad)
    else:  # PyTorch has no product of two types there
        main_grad.addmm_(grad.t().float(), rows.float())
