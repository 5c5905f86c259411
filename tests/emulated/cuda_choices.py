"""What the actor does on CUDA alone, forced on over gloo, in a rank of the tests' pool.

Patched for the time of a `with`, and put back: the device's choice, every branch of Megatron's config that asks for
CUDA, small gradient buckets (a 32B model has dozens, a tiny one would have one), and a kernel in PyTorch for Apex's
fused weight gradients. Not forced, since gloo or a CPU cannot run them: TransformerEngine's layers, FusedAdam, streams.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

BUCKET_NUMBERS = 20_000
"""Of a gradient bucket: a tiny model's stage has several."""


@contextmanager
def cuda_choices() -> Iterator[Counter[str]]:
    """Actors built and run inside choose as on CUDA; counts what was asked of them."""
    from megatron.core import parallel_state
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.tensor_parallel import layers

    from megatron_dapo.actor import device, optimizer
    from megatron_dapo.actor.model import model_chunks as model

    seen: Counter[str] = Counter()
    with ExitStack() as stack:

        def put(holder: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(holder, name, value, create=True))

        put(device, "prepare_for", partial(_prepare_for, device.prepare_for))
        put(model, "transformer_config", partial(_transformer_config, model.transformer_config))
        put(torch.cuda, "current_device", lambda: torch.device("cpu"))
        put(layers, "fused_weight_gradient_mlp_cuda", _fused_weight_gradients(seen))
        put(layers, "_grad_accum_fusion_available", True)
        without_gloo = partial(parallel_state.initialize_model_parallel, create_gloo_process_groups=False)
        put(parallel_state, "initialize_model_parallel", without_gloo)
        put(
            optimizer,
            "get_megatron_optimizer",
            partial(optimizer.get_megatron_optimizer, use_gloo_process_groups=False),
        )
        small = partial(optimizer.DistributedDataParallelConfig, bucket_size=BUCKET_NUMBERS)
        put(optimizer, "DistributedDataParallelConfig", small)
        groups = _ParamAndGradBucketGroup
        put(groups, "register_grad_ready", _count_early_reductions(groups.register_grad_ready, seen))
        yield seen


def _prepare_for(real: Any, config: Any, dtype: Any) -> Any:
    from megatron_dapo.actor.device import Found, choose

    chosen = choose(replace(config, device="cuda"), dtype, Found(index=0, gradient_accumulation=True))
    asked = ("overlap_grad_reduce", "gradient_accumulation")
    return replace(real(config, dtype), **{name: getattr(chosen, name) for name in asked})


def _transformer_config(real: Any, hf: Any, actor: Any, dtype: str, choice: Any) -> Any:
    return real(hf, actor, dtype, replace(choice, device=torch.device("cuda")))


def _fused_weight_gradients(seen: Counter[str]) -> SimpleNamespace:
    """Apex's module: the weight's gradient is added to its float32 buffer by the product itself."""

    def wgrad_gemm_accum_fp32(rows: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        seen["fused weight gradients"] += 1
        main_grad.addmm_(grad_output.float().t(), rows.float())

    return SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)


def _count_early_reductions(register: Any, seen: Counter[str]) -> Any:
    """Counts the reductions that begin during backward."""

    def register_grad_ready(group: Any, *args: Any, **kwargs: Any) -> None:
        before = group.grad_reduce_handle
        register(group, *args, **kwargs)
        if before is None and group.grad_reduce_handle is not None:
            seen["reductions during backward"] += 1

    return register_grad_ready
