"""A traced rank with a fault: `python -m tests.symbolic.planted FAULT JOB`. On every rank, or on rank 1 alone."""

import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.symbolic import one_rank


def cpu_tensor_in_a_collective() -> None:
    from megatron_dapo.actor.step import ForwardBackward

    own = ForwardBackward.log_probs

    def log_probs(self: Any, *args: Any) -> Any:
        dist.all_reduce(torch.zeros(3))
        return own(self, *args)

    ForwardBackward.log_probs = log_probs  # type: ignore[method-assign]


def rank_that_skips_a_collective() -> None:
    from megatron_dapo.actor import step

    own = step.dist.all_reduce

    def all_reduce(*args: Any, **options: Any) -> Any:
        return None if dist.get_rank() == 1 else own(*args, **options)

    step.dist.all_reduce = all_reduce


def number_read_in_the_loop() -> None:
    from megatron_dapo.actor.step import ForwardBackward

    own = ForwardBackward._loss

    def _loss(self: Any, *args: Any, **options: Any) -> Any:
        result = own(self, *args, **options)
        result[0].item()
        return result

    ForwardBackward._loss = _loss  # type: ignore[method-assign]


def send_that_nobody_receives() -> None:
    from megatron_dapo.actor.actor import MegatronActor

    own = MegatronActor.stream_weights

    def stream_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 1:
            dist.send(torch.zeros(3, device="cuda"), dst=0)
        own(self, *args, **kwargs)

    MegatronActor.stream_weights = stream_weights  # type: ignore[method-assign]


def gigabyte_that_nobody_planned() -> None:
    from megatron_dapo.actor.optimizer import ActorOptimizer

    own = ActorOptimizer.zero_grad

    def zero_grad(self: Any) -> None:
        own(self)
        self.kept = torch.empty(2**30, dtype=torch.uint8, device="cuda")

    ActorOptimizer.zero_grad = zero_grad  # type: ignore[method-assign]


if __name__ == "__main__":
    fault = globals()[sys.argv.pop(1)]
    replace = one_rank._replace_files

    def replace_and_plant(*args: Any) -> None:
        replace(*args)
        fault()

    one_rank._replace_files = replace_and_plant
    one_rank.main()
