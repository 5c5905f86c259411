"""AdamW with the state layout of TransformerEngine's and Apex's FusedAdam, for where neither is installed.

Megatron's own fallback, torch.optim.AdamW, trains, but keeps its step counter as a tensor for each parameter where
the distributed optimizer's checkpoints expect one number for each group: loading such a checkpoint breaks, or goes on
with one counter shared by all parameters and silently diverges.
"""

from collections.abc import Callable, Iterable
from typing import Any

import megatron.core.optimizer
import megatron.core.optimizer.distrib_optimizer
import torch
from torch.optim.adam import adam


class FusedLayoutAdam(torch.optim.Optimizer):
    """AdamW (decoupled decay) or Adam.

    `group["step"]` is an int; a parameter's state is `exp_avg` and `exp_avg_sq`, float32, of the parameter's shape.
    """

    def __init__(self, params: Iterable[Any], *, adam_w_mode: bool = True, **settings: Any):
        """`settings`: lr, betas, eps and weight_decay."""
        super().__init__(params, settings | {"bias_correction": True})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; Megatron never gives a closure."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in parameters]
            adam(
                params=parameters,
                grads=[parameter.grad.float() for parameter in parameters],
                exp_avgs=[state["exp_avg"] for state in states],
                exp_avg_sqs=[state["exp_avg_sq"] for state in states],
                max_exp_avg_sqs=[],
                # The kernel counts up each tensor of this list: one for each parameter, or the count would run ahead.
                state_steps=[torch.tensor(float(group["step"] - 1), device=one.device) for one in parameters],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        for name in () if state else ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        return state


def fused_package() -> str | None:
    """The package whose FusedAdam Megatron has imported: transformer_engine or apex; None: neither is there."""
    optimizer = megatron.core.optimizer
    if optimizer.Adam is FusedLayoutAdam or optimizer.USING_PYTORCH_OPTIMIZER:
        return None
    return optimizer.Adam.__module__.partition(".")[0]


def put_in_place() -> None:
    """Make FusedLayoutAdam the Adam of Megatron's optimizers; on the CPU in any case, the fused ones are CUDA
    kernels."""
    optimizer, distributed = megatron.core.optimizer, megatron.core.optimizer.distrib_optimizer
    optimizer.Adam = distributed.Adam = FusedLayoutAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    # "TransformerEngine or Apex" selects, in the distributed optimizer, the state layout that FusedLayoutAdam has.
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
    distributed.USING_TE_OPTIMIZER = False
