"""torch.distributed and Megatron's parallel state for one rank."""

import os
import socket
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_dapo.actor.device import DeviceChoice
from megatron_dapo.config.actor_config import LayoutConfig

LOOPBACK, GLOO_INTERFACE = ("127.0.0.1", "::1", "localhost"), "GLOO_SOCKET_IFNAME"


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
    """Join `world_size` ranks at `rendezvous` ("tcp://address:port" or "file://path") and split them by `layout`.

    Ranks are ordered tensor, context, data, pipeline, the tensor-parallel ones next to each other; for the experts'
    weights a stage's ranks are ordered expert-tensor, expert, and those that hold the same. Every collective
    of every group ends after `timeout_s` seconds at the latest: with an error under gloo, with the end of the process
    under NCCL. `seed` goes to Megatron's generators (dropout and initial weights; the same for all data-parallel
    ranks).
    """
    where, timeout = urlsplit(rendezvous), timedelta(seconds=timeout_s)
    host, port = where.hostname or "", where.port or 0
    by_store = where.scheme == "tcp"
    with ExitStack() as stack:
        # Where the ranks meet on loopback gloo shall listen there too, and not on the address of the machine's name.
        if by_store and host in LOOPBACK and GLOO_INTERFACE not in os.environ:
            os.environ[GLOO_INTERFACE] = "lo"
            stack.callback(os.environ.pop, GLOO_INTERFACE)
        meeting: dict[str, Any] = {"init_method": rendezvous}
        if by_store:
            meeting = {"store": _store(host, port, rank, world_size, timeout)}
        dist.init_process_group(device.backend, **meeting, rank=rank, world_size=world_size, timeout=timeout)
        # A network that does not work shows here, before anything is drawn. The other groups connect at their first
        # call: named a device above, NCCL would connect all twenty now, 0.4 GiB of the GPU each.
        dist.all_reduce(torch.ones(1, device=device.device))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            distributed_timeout_minutes=timeout_s / 60,
            # Only checkpoint formats that are not used here gather over them, and over several nodes each would need
            # an address that gloo finds by the machine's name.
            create_gloo_process_groups=False,
        )
    model_parallel_cuda_manual_seed(seed)


def _store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """Torch's store on rank 0, listening on that address alone; torch by itself listens on every interface."""
    if rank > 0:
        return dist.TCPStore(host, port, world_size, timeout=timeout)
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    serving: dict[str, Any] = {"is_master": True, "multi_tenant": True, "master_listen_fd": listener.detach()}
    return dist.TCPStore(host, port, world_size, timeout=timeout, **serving)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """`value` of every rank of the group, by rank."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def shutdown() -> None:
    """Leave all groups; the process may `initialise` again."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
