"""Which servers a run uses: running ones by URL, new ones on this machine, or new ones that Ray places on a cluster."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_dapo.cluster.placement import Placement, PlacementError, check_shared_gpus
from megatron_dapo.cluster.ray_server import RayServer
from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.config import Config
from rollout.server.engine import Engine, LocalServer, RemoteServer
from rollout.server.server_command import Secret, ServerSpec, new_key, read_key

KEY_FILE = ".server-key"
"""In the run directory, which every node sees."""


def visible_gpus(count: int) -> tuple[str, ...]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES knows them.

    Args:
        count: `torch.cuda.device_count()`.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in named.split(",")] if named is not None else [str(at) for at in range(count)]
    return tuple(names[:count])


def own_engines(config: Config, logs: Path, *, gpus: Sequence[str]) -> list[Engine]:
    """The servers of `rollout.urls`, or `rollout.servers` of this machine's own, not yet started.

    On this machine the trainer takes the first GPUs, the servers those after them, or with `run.mode: colocated` the
    same ones.

    Args:
        logs: folder of the servers' logs.
        gpus: `visible_gpus`; none for a run on the CPU.

    Raises:
        PlacementError: trainer and servers need more GPUs than there are, or cannot share them.
    """
    return _engines(config, logs, gpus, _places_behind_trainer)


def on_gpu_of_rank_0(engines: Sequence[Engine], gpus: Sequence[str]) -> bool:
    """Whether one of `own_engines` is on the GPU of the trainer's rank 0, the first of `gpus`."""
    return any(isinstance(engine, LocalServer) and gpus[0] in engine.spec.gpus for engine in engines)


def lone_engines(config: Config, logs: Path, *, gpus: Sequence[str]) -> list[Engine]:
    """The same without a trainer beside them: the servers take the first GPUs.

    Raises:
        PlacementError: the servers need more GPUs than there are.
    """
    return _engines(config, logs, gpus, _first_places)


def _engines(
    config: Config, logs: Path, gpus: Sequence[str], places_on: Callable[[Config, Sequence[str]], list[tuple[str, ...]]]
) -> list[Engine]:
    if config.rollout.urls:
        return [RemoteServer(url) for url in config.rollout.urls]
    places = places_on(config, gpus) if gpus else [()] * config.rollout.servers
    return [
        LocalServer(config.rollout, _spec(config, logs, index, on_gpu=bool(gpus), gpus=place))
        for index, place in enumerate(places)
    ]


def placed_engines(config: Config, logs: Path, placement: Placement, trainer: Trainer, *, on_gpu: bool) -> list[Engine]:
    """A server in each of the placement's places for servers. Ray says which GPUs it sees, or with `run.mode:
    colocated` the trainer's ranks do, which have started by then."""
    each = config.rollout.tensor_parallel

    async def beside(index: int) -> tuple[str, ...]:
        return tuple((await trainer.gpus())[index * each : (index + 1) * each])

    shared = config.run.mode == "colocated" and on_gpu
    return [
        RayServer(
            config.rollout,
            _spec(config, logs, index, on_gpu=on_gpu),
            placement,
            bundle,
            shared_gpus=partial(beside, index) if shared else None,
        )
        for index, bundle in enumerate(placement.servers)
    ]


def api_key(config: Config, run_path: Path) -> Secret | None:
    """What the run's servers ask for; for servers that the run starts it is made anew.

    Raises:
        KeyFileError: `rollout.api_key_file` cannot be used.
    """
    file = key_file(config, run_path)
    if not config.rollout.urls:
        new_key(run_path / KEY_FILE)
    return None if file is None else read_key(file)


def key_file(config: Config, run_path: Path) -> Path | None:
    """Where that key is; None if the servers of `rollout.urls` ask for none."""
    if config.rollout.urls:
        return Path(config.rollout.api_key_file).resolve() if config.rollout.api_key_file else None
    return run_path.resolve() / KEY_FILE


def _spec(config: Config, logs: Path, index: int, *, on_gpu: bool, gpus: tuple[str, ...] = ()) -> ServerSpec:
    return ServerSpec(
        model_path=Path(config.model.path).resolve(),
        device="cuda" if on_gpu else "cpu",
        dtype=config.model.dtype,
        context_length=config.model.context_length,
        seed=(config.run.seed + index) % 2**32,
        log_path=logs / f"server{index}.log",
        api_key_file=logs.parent / KEY_FILE,
        index=index,
        shares_memory=config.run.mode == "colocated",
        gpus=gpus,
    )


def _first_places(config: Config, gpus: Sequence[str]) -> list[tuple[str, ...]]:
    each, servers = config.rollout.tensor_parallel, config.rollout.servers
    if servers * each > len(gpus):
        raise PlacementError(
            f"rollout.servers x rollout.tensor_parallel = {servers * each} GPUs; this process sees {len(gpus)} "
            "(CUDA_VISIBLE_DEVICES); lower one of the two, e.g. rollout.servers=1"
        )
    return [tuple(gpus[at * each : (at + 1) * each]) for at in range(servers)]


def _places_behind_trainer(config: Config, gpus: Sequence[str]) -> list[tuple[str, ...]]:
    trainer, each, servers = config.actor.layout.world_size, config.rollout.tensor_parallel, config.rollout.servers
    if config.run.mode == "colocated":
        check_shared_gpus(config)
        if trainer > len(gpus):
            raise PlacementError(f"actor.layout needs {trainer} GPUs; this machine offers {len(gpus)}")
        return _first_places(config, gpus)
    if len(gpus) == trainer == each == servers == 1:
        return _first_places(config, gpus)  # one for both: rollout.memory_fraction says how much of it the server takes
    if trainer + servers * each > len(gpus):
        raise PlacementError(
            f"actor.layout needs {trainer} GPUs and rollout.servers x rollout.tensor_parallel = {servers * each} more; "
            f"this machine offers {len(gpus)}; lower one of them or name running servers in rollout.urls"
        )
    return _first_places(config, gpus[trainer:])
