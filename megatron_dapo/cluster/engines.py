"""Which servers a run uses: running ones by URL, new ones on this machine, or new ones that Ray places on a cluster."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_dapo.cluster.placement import Placement, PlacementError, check_shared_gpus
from megatron_dapo.cluster.ray_server import RayServer
from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.config import Config
from rollout.server.api_key import Secret, new_key, read_key
from rollout.server.engine import Engine, LocalServer, RemoteServer
from rollout.server.server_command import ServerSpec

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

    Args:
        logs: folder of the servers' logs.
        gpus: the servers take the first of them; none: they are on the CPU.

    Raises:
        PlacementError: they need more GPUs.
    """
    if config.rollout.urls:
        return [RemoteServer(url) for url in config.rollout.urls]
    each, servers = config.rollout.tensor_parallel, config.rollout.servers
    if gpus and servers * each > len(gpus):
        raise PlacementError(
            f"rollout.servers x rollout.tensor_parallel = {servers * each} GPUs; there are {len(gpus)} for them "
            "(CUDA_VISIBLE_DEVICES); lower one of the two, e.g. rollout.servers=1"
        )
    return [
        LocalServer(
            config.rollout,
            _spec(config, logs, at, on_gpu=bool(gpus), gpus=tuple(gpus[at * each : (at + 1) * each])),
        )
        for at in range(servers)
    ]


def gpus_for_servers(config: Config, gpus: Sequence[str]) -> Sequence[str]:
    """Those of this machine that servers may take when the trainer takes the first ones: the ones after them, or with
    `run.mode: colocated` the same ones.

    Raises:
        PlacementError: trainer and servers need more GPUs than there are, or cannot share them.
    """
    trainer, each, servers = config.actor.layout.world_size, config.rollout.tensor_parallel, config.rollout.servers
    if not gpus or config.rollout.urls:
        return ()
    shared = config.run.mode == "colocated"
    if shared:
        check_shared_gpus(config)
    # One GPU is for both: rollout.memory_fraction says how much of it the server takes.
    behind = 0 if shared or len(gpus) == trainer == each == servers == 1 else trainer
    if trainer > len(gpus) or behind + servers * each > len(gpus):
        raise PlacementError(
            f"actor.layout needs {trainer} GPUs and rollout.servers x rollout.tensor_parallel = {servers * each} "
            f"{'of them' if shared else 'more'}; this machine offers {len(gpus)}; lower one of them or name running "
            "servers in rollout.urls"
        )
    return gpus[behind:]


def on_gpu_of_rank_0(engines: Sequence[Engine], gpus: Sequence[str]) -> bool:
    """Whether one of `own_engines` is on the GPU of the trainer's rank 0, the first of `gpus`."""
    return any(isinstance(engine, LocalServer) and set(gpus[:1]) & set(engine.spec.gpus) for engine in engines)


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
