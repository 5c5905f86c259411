"""The processes that answer a run: Ray, reward workers, trainer ranks, rollout servers."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.cluster.engines import api_key, key_file, on_gpu_of_rank_0, own_engines, placed_engines, visible_gpus
from megatron_dapo.cluster.gpu_handover import GpuHandover
from megatron_dapo.cluster.placement import Placement, place
from megatron_dapo.cluster.ray_cluster import GCS, Cluster
from megatron_dapo.cluster.trainer import WATCH_INTERVAL_S, CheckpointUnreadable, Trainer, TrainerError, TrainerLost
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config
from megatron_dapo.coordinator.inputs import Inputs
from megatron_dapo.coordinator.progress import Progress, damaged_checkpoint
from megatron_dapo.monitor.console import Console
from megatron_dapo.monitor.timeline import Timeline
from megatron_dapo.storage.run_dir import RunDir, RunDirError
from reward.pool.pool import RewardPool
from rollout.fleet.fleet import RolloutFleet

RAY_STOP_DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Services:
    """What answers the coordinator, and the book of its waits."""

    trainer: Trainer
    fleet: RolloutFleet
    pool: RewardPool
    waits: Waits
    handover: GpuHandover
    key_file: Path | None
    """With the API key of the servers."""
    shared_gpu: bool
    """Whether a server shares a GPU with a trainer rank."""


async def start_services(
    config: Config,
    inputs: Inputs,
    run_dir: RunDir,
    console: Console,
    stack: AsyncExitStack,
    waits: Waits,
    progress: Progress,
    timeline: Timeline,
) -> tuple[Services, dict[str, Any]]:
    """Ray, reward workers, trainer and servers, side by side where they can be; `stack` closes them.

    Returns the services and rank 0's description of the trainer.
    """
    pool = RewardPool(config.reward)
    stack.callback(pool.close)
    with waits.blocking("Ray start", "Ray", config.run.start_deadline_s):
        cluster = Cluster(processes=config.actor.layout.world_size, device=config.actor.device)
    stack.callback(_end_cluster, cluster, waits)
    watching = asyncio.create_task(_until_cluster_lost(cluster, waits, run_dir.logs))
    stack.callback(watching.cancel)
    by_ray = cluster.joined and not config.rollout.urls
    gpus = visible_gpus(torch.cuda.device_count()) if cluster.use_gpu and not by_ray else ()
    placement = await place(config, waits, use_gpu=cluster.use_gpu, servers=config.rollout.servers if by_ray else 0)
    trainer = Trainer(config, inputs.model, run_dir.path, waits, use_gpu=cluster.use_gpu)
    stack.push_async_callback(trainer.close)
    timeline.follow(trainer)
    if by_ray:
        engines = placed_engines(config, run_dir.logs, placement, trainer, on_gpu=cluster.use_gpu)
    else:
        engines = own_engines(config, run_dir.logs, gpus=gpus)
    fleet = RolloutFleet(
        config.rollout,
        engines,
        vocab_size=inputs.text.vocab_size,
        report=console.note,
        api_key=api_key(config, run_dir.path),
        observe=timeline.served if config.monitor.timeline_every else None,
    )
    stack.push_async_callback(fleet.close)
    described = await _start_both(config, _start_trainer(trainer, placement, progress, run_dir), fleet, waits)
    services = Services(
        trainer=trainer,
        fleet=fleet,
        pool=pool,
        waits=waits,
        handover=GpuHandover(config.run, fleet, trainer.device_memory, waits, report=console.note),
        key_file=key_file(config, run_dir.path),
        shared_gpu=bool(gpus) and on_gpu_of_rank_0(engines, gpus),
    )
    return services, described


def _end_cluster(cluster: Cluster, waits: Waits) -> None:
    with waits.blocking("Ray stop", "Ray", RAY_STOP_DEADLINE_S):
        cluster.close()


async def _until_cluster_lost(cluster: Cluster, waits: Waits, logs: Path) -> None:
    """Ends every wait as soon as this run's own Ray is lost; the run then starts again with a new one."""
    while not cluster.lost():
        await asyncio.sleep(WATCH_INTERVAL_S)
    waits.lose(TrainerLost(f"Ray's process {GCS} ended, and the trainer ranks cannot go on without it; logs: {logs}"))


async def _start_trainer(trainer: Trainer, placement: Placement, progress: Progress, run_dir: RunDir) -> dict[str, Any]:
    """All ranks built, with the weights that the run goes on from. Returns rank 0's description."""
    described = await trainer.start(placement)
    latest = run_dir.latest_checkpoint() if progress.rollout_step else None
    if latest is None:
        return described
    try:
        await trainer.load_checkpoint(latest.folder / "actor")
        return described
    except TrainerLost:
        raise
    except CheckpointUnreadable as error:
        raise await damaged_checkpoint(run_dir, latest, str(error)) from None
    except TrainerError as error:
        raise RunDirError(str(error)) from None


async def _start_both(
    config: Config, trainer: Awaitable[dict[str, Any]], fleet: RolloutFleet, waits: Waits
) -> dict[str, Any]:
    """Trainer and servers at once; the first failure ends the other. Returns the trainer's answer."""
    deadline = config.run.start_deadline_s
    building = asyncio.ensure_future(trainer)
    if config.run.mode == "colocated":
        # First, and out of the memory again: a server takes its share of what is free when it starts.
        await building
    # The fleet has the same deadline and the better explanation: it gets the first word.
    starting = waits.wait_for("server start", "SGLang servers", deadline + 30, fleet.start(deadline))
    serving = asyncio.ensure_future(starting)
    try:
        await asyncio.gather(building, serving)
    except BaseException:
        for task in (building, serving):
            task.cancel()
        await asyncio.gather(building, serving, return_exceptions=True)
        raise
    return building.result()
