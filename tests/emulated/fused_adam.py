"""TransformerEngine's FusedAdam as Megatron's precision-aware optimizer uses it, its CUDA kernels in PyTorch.

`FusedAdam` stands in for its Python where that is not installed: the same arguments, methods, and names and types of
the state. `adam_of_halves` is the kernel, from its source (transformer_engine/common/multi_tensor/adam.cu,
AdamFunctorMasterParamRemainder), for the stand-in and for the real Python.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch


def join(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The float32 numbers of which `weight` (bfloat16) is the rounded upper half and `rest` (int16) the lower."""
    return ((weight.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def split(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The opposite; what is halfway is rounded away from zero."""
    bits = whole.contiguous().view(torch.int32)
    rest = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    return ((bits - rest) >> 16).to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def adam_of_halves(
    chunk: int,
    noop: torch.Tensor,
    lists: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Gradients, weights, both moments and lower halves, each list of tensors; the last four are changed."""
    assert (mode, bias_correction) == (1, 1)
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    for grad, weight, first, second, rest in zip(*lists, strict=True):
        assert (grad.dtype, weight.dtype, rest.dtype) == (torch.float32, torch.bfloat16, torch.int16)
        assert first.dtype == second.dtype
        master = join(weight, rest)
        m = beta1 * first.float() + (1 - beta1) * grad
        v = beta2 * second.float() + (1 - beta2) * grad * grad
        update = (m / correction1) / ((v / correction2).sqrt() + eps) + decay * master
        halves = split(master - lr * update)
        for place, value in zip((first, second, weight, rest), (m, v, *halves), strict=True):
            place.copy_(value)


class FusedAdam(torch.optim.Optimizer):
    """With decoupled gradients and weights kept as halves; nothing else."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        assert adam_w_mode
        assert not capturable
        assert master_weights
        assert master_weight_dtype == torch.float32
        assert use_decoupled_grad
        assert store_param_remainders
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": torch.int16}

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert store_param_remainders
        for name, dtype in self.dtypes.items():
            self.state[param][name] = torch.zeros_like(param, dtype=dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            weights = [param for param in group["params"] if param.decoupled_grad is not None]
            for param in weights:
                if not self.state[param]:
                    self.initialize_state(param, True)
            lists = [[param.decoupled_grad for param in weights], weights]
            lists += [[self.state[param][name] for param in weights] for name in self.dtypes]
            rates = group["lr"], *group["betas"], group["eps"], group["step"], 1, 1, group["weight_decay"]
            adam_of_halves(0, torch.zeros(1), lists, *rates)


def packages() -> dict[str, types.ModuleType]:
    """What Megatron asks of TransformerEngine where it makes its optimizers, by name for `sys.modules`."""
    made = {name: types.ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    made["transformer_engine"].__version__ = "2.19.0"  # type: ignore[attr-defined]
    optimizers = made["transformer_engine.pytorch.optimizers"] = types.ModuleType("optimizers")
    optimizers.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    return made


@contextmanager
def installed() -> Iterator[None]:
    """Actors that are built inside find it, and choose as on CUDA."""
    import dataclasses

    import megatron.core.utils
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from megatron_dapo.actor import device

    real = device.prepare_for

    def prepare_for(config: Any, dtype: Any) -> device.DeviceChoice:
        found = device.Found(index=0, fused_adam="transformer_engine")
        chosen = device.choose(dataclasses.replace(config, device="cuda"), dtype, found)
        without = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, compact="none"))
        made = real(without, dtype)
        if config.optimizer.compact != "none":
            optimizer.Adam = distrib_optimizer.Adam = FusedAdam
        gpu = {"device": torch.device("cuda", 0), "backend": "nccl"}
        return dataclasses.replace(made, **gpu, overlap_grad_reduce=chosen.overlap_grad_reduce)

    with ExitStack() as stack:
        # Not all of `sys.modules`: what is imported meanwhile stays.
        absent = {name: sys.modules.get(name) for name in packages()}
        stack.callback(sys.modules.update, absent)
        sys.modules.update(packages())
        stack.enter_context(mock.patch.object(megatron.core.utils, "_te_version", None))
        stack.enter_context(mock.patch.object(device, "prepare_for", prepare_for))
        yield
