"""torch.distributed and Megatron's parallel state for one rank."""

from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_dapo.actor.device import DeviceChoice
from megatron_dapo.config.actor import LayoutConfig


def initialise(
    layout: LayoutConfig,
    *,
    rank: int,
    world_size: int,
    rendezvous: str,
    device: DeviceChoice,
    timeout_s: float,
    seed: int,
) -> None:
    """Join `world_size` ranks at `rendezvous` ("tcp://host:port" or "file://path") and split them by `layout`.

    Ranks are ordered tensor, context, data, pipeline, the tensor-parallel ones next to each other. Every collective
    of every group ends after `timeout_s` seconds at the latest: with an error under gloo, with the end of the process
    under NCCL. `seed` goes to Megatron's generators (dropout and initial weights; the same for all data-parallel
    ranks).

    Raises:
        ValueError: `layout` is not for `world_size` ranks.
    """
    if layout.world_size != world_size:
        raise ValueError(
            f"actor.layout: tensor x pipeline x context x data = {layout.world_size}, but {world_size} ranks were "
            "started; make the two equal"
        )
    torch.distributed.init_process_group(
        device.backend,
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device.device if device.backend == "nccl" else None,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        distributed_timeout_minutes=timeout_s / 60,
    )
    model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Leave all groups; the process may `initialise` again."""
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
