"""Which servers a run uses, and on which GPUs: the trainer takes the first ones, the servers those after them."""

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.config import Config
from megatron_dapo.coordinator.trainer import PlacementError
from rollout.command import ServerSpec
from rollout.server import Engine, LocalServer, RemoteServer


def visible_gpus(count: int) -> tuple[str, ...]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES knows them.

    Args:
        count: `torch.cuda.device_count()`.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in named.split(",")] if named is not None else [str(at) for at in range(count)]
    return tuple(names[:count])


def make_engines(config: Config, logs: Path, *, gpus: Sequence[str]) -> list[Engine]:
    """The servers of `rollout.urls`, or `rollout.servers` of this machine's own, not yet started.

    Args:
        logs: folder of the servers' logs.
        gpus: `visible_gpus`; none for a run on the CPU.

    Raises:
        PlacementError: trainer and servers need more GPUs than there are.
    """
    rollout = config.rollout
    if rollout.urls:
        return [RemoteServer(url) for url in rollout.urls]
    places = _gpu_places(config, gpus) if gpus else [()] * rollout.servers
    return [
        LocalServer(
            rollout,
            ServerSpec(
                model_path=Path(config.model.path),
                device="cuda" if gpus else "cpu",
                dtype=config.model.dtype,
                context_length=config.model.context_length,
                seed=config.run.seed,
                log_path=logs / f"server{index}.log",
                index=index,
                gpus=place,
            ),
        )
        for index, place in enumerate(places)
    ]


def _gpu_places(config: Config, gpus: Sequence[str]) -> list[tuple[str, ...]]:
    trainer, each, servers = config.actor.layout.world_size, config.rollout.tensor_parallel, config.rollout.servers
    if len(gpus) == trainer == each == servers == 1:
        return [(gpus[0],)]  # one GPU for both: rollout.memory_fraction says how much of it the server takes
    if trainer + servers * each > len(gpus):
        raise PlacementError(
            f"actor.layout needs {trainer} GPUs and rollout.servers x rollout.tensor_parallel = {servers * each} more; "
            f"this machine offers {len(gpus)}; lower one of them or name running servers in rollout.urls"
        )
    return [tuple(gpus[trainer + at * each : trainer + (at + 1) * each]) for at in range(servers)]
