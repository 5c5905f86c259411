"""What the actor does on CUDA alone, forced on over gloo, in a rank of the tests' pool.

Patched for the time of a `with`, and put back: the device's choice, every branch of Megatron's config that asks for
CUDA, weight gradients summed by the matrix product also in float32, and small gradient buckets (a 32B model has dozens,
a tiny one would have one). Not forced, since gloo or a CPU cannot run them: TransformerEngine's layers, FusedAdam,
streams.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
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

    from megatron_dapo.actor import device, optimizer
    from megatron_dapo.actor.device import weight_gradients
    from megatron_dapo.actor.model import model_chunks as model

    seen: Counter[str] = Counter()
    with ExitStack() as stack:

        def put(holder: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(holder, name, value, create=True))

        put(device, "prepare_for", partial(_prepare_for, device.prepare_for))
        put(model, "transformer_config", partial(_transformer_config, model.transformer_config))
        put(torch.cuda, "current_device", lambda: torch.device("cpu"))
        fused = weight_gradients.wgrad_gemm_accum_fp32
        put(weight_gradients, "wgrad_gemm_accum_fp32", partial(_count_products, fused, seen))
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

    chosen = choose(replace(config, device="cuda"), dtype, Found(index=0))
    accumulates = config.lora.rank == 0
    return replace(
        real(config, dtype),
        overlap_grad_reduce=chosen.overlap_grad_reduce,
        gradient_accumulation=accumulates,
    )


def _transformer_config(real: Any, hf: Any, actor: Any, dtype: str, choice: Any) -> Any:
    return real(hf, actor, dtype, replace(choice, device=torch.device("cuda")))


def _count_products(real: Any, seen: Counter[str], *given: torch.Tensor) -> None:
    seen["fused weight gradients"] += 1
    real(*given)


def _count_early_reductions(register: Any, seen: Counter[str]) -> Any:
    """Counts the reductions that begin during backward."""

    def register_grad_ready(group: Any, *args: Any, **kwargs: Any) -> None:
        before = group.grad_reduce_handle
        register(group, *args, **kwargs)
        if before is None and group.grad_reduce_handle is not None:
            seen["reductions during backward"] += 1

    return register_grad_ready
