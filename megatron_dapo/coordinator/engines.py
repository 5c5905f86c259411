"""Which servers a run uses, and on which GPUs: the trainer takes the first ones, the servers those after them."""

from pathlib import Path

from megatron_dapo.config import Config
from megatron_dapo.coordinator.trainer import PlacementError
from rollout.command import ServerSpec
from rollout.server import Engine, LocalServer, RemoteServer


def make_engines(config: Config, logs: Path, *, gpus: int) -> list[Engine]:
    """The servers of `rollout.urls`, or `rollout.servers` of this machine's own, not yet started.

    Args:
        logs: folder of the servers' logs.
        gpus: GPUs of this machine; 0 for a run on the CPU.

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


def _gpu_places(config: Config, gpus: int) -> list[tuple[int, ...]]:
    trainer, each, servers = config.actor.layout.world_size, config.rollout.tensor_parallel, config.rollout.servers
    if gpus == trainer == each == servers == 1:
        return [(0,)]  # one GPU for both: rollout.memory_fraction says how much of it the server takes
    if trainer + servers * each > gpus:
        raise PlacementError(
            f"actor.layout needs {trainer} GPUs and rollout.servers x rollout.tensor_parallel = {servers * each} more; "
            f"this machine has {gpus}; lower one of them or name running servers in rollout.urls"
        )
    return [tuple(range(trainer + at * each, trainer + (at + 1) * each)) for at in range(servers)]
