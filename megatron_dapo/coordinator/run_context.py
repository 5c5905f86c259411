"""Everything a run is made of, started in the right order and closed in the opposite one."""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.cluster.engines import api_key, key_file, on_gpu_of_rank_0, own_engines, placed_engines, visible_gpus
from megatron_dapo.cluster.gpu_handover import GpuHandover
from megatron_dapo.cluster.placement import Placement, place
from megatron_dapo.cluster.ray_cluster import GCS, Cluster
from megatron_dapo.cluster.trainer import WATCH_INTERVAL_S, CheckpointUnreadable, Trainer, TrainerError, TrainerLost
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config, dump_config
from megatron_dapo.config.load import flatten
from megatron_dapo.coordinator.batch import objective_of
from megatron_dapo.coordinator.checkpoints import Checkpoints, Progress, damaged_checkpoint, load_counters
from megatron_dapo.coordinator.inputs import Inputs
from megatron_dapo.coordinator.resume import check_resume, manifest, one_line
from megatron_dapo.coordinator.sampler import DynamicSampler, SamplerState
from megatron_dapo.experience.evaluation import Answers, Evaluator
from megatron_dapo.experience.generator import GroupGenerator, Responder
from megatron_dapo.monitor.console import Console
from megatron_dapo.monitor.health import HealthLimits, HealthMonitor
from megatron_dapo.monitor.statistics import EVALUATIONS
from megatron_dapo.monitor.timeline import Timeline
from megatron_dapo.monitor.weights_and_biases import WandbMirror
from megatron_dapo.monitor.writer import MetricsWriter, read_metrics
from megatron_dapo.storage.ledger import Event, Ledger
from megatron_dapo.storage.run_dir import RunDir, RunDirError
from reward.pool.pool import RewardPool
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import SamplingParams

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


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Everything a run is made of; used only by the loop and the functions it calls."""

    config: Config
    inputs: Inputs
    run_dir: RunDir
    console: Console
    services: Services
    ledger: Ledger
    writer: MetricsWriter
    health: HealthMonitor
    generator: GroupGenerator
    sampler: DynamicSampler
    evaluator: Evaluator
    timeline: Timeline
    objective: PolicyObjective
    checkpoints: Checkpoints
    progress: Progress
    """Where the run stood when it started: at the beginning, or at the checkpoint it goes on from."""
    start_seconds: float

    async def evaluate(self, name: str, *, forbid: int | None = None) -> dict[str, Answers]:
        """Held-out answers with the weights that the servers hold now; `forbid`: as Evaluator.run."""
        async with self.services.handover.servers():
            return await self.services.waits.wait_for(
                "held-out answers",
                "rollout servers",
                self.config.run.step_deadline_s,
                self.evaluator.run(name, forbid=forbid),
                stoppable=True,
            )


async def start_run(
    config: Config, inputs: Inputs, run_dir: RunDir, console: Console, stack: AsyncExitStack, waits: Waits
) -> RunContext:
    """Start Ray, trainer, servers and reward workers side by side; `stack` closes them.

    Raises:
        Exception: what failed to start, with its own explanation; the rest is closed by `stack`.
    """
    began = time.monotonic()
    if config.run.resume:
        check_resume(config, inputs, run_dir)
    progress = await _progress(config, run_dir)
    if config.run.resume:
        console.note(f"resuming after rollout step {progress.rollout_step}")
    ledger = Ledger(run_dir.ledger)
    stack.callback(ledger.close)
    if config.run.resume:
        ledger.record(Event.RESUMED, rollout_step=progress.rollout_step, weight_version=progress.weight_version)
        ledger.commit()
    mirror = _mirror(config, run_dir, stack)
    timeline = Timeline(run_dir.path, every=config.monitor.timeline_every)
    stack.callback(timeline.close)
    services, described = await start_services(config, inputs, run_dir, console, stack, waits, progress, timeline)
    run_dir.write_text("config.yaml", dump_config(config))
    run_dir.write_json("manifest.json", manifest(config, inputs, described))
    console.note(one_line(described))
    for kernel, choice in described["kernels"].items():
        console.note(f"  {kernel}: {choice}")
    checkpoints = Checkpoints(config.run, run_dir, services.trainer, services.handover, ledger, waits, console)
    await stack.enter_async_context(checkpoints)
    writer = MetricsWriter(run_dir.path, tensorboard=config.monitor.tensorboard, mirror=mirror)
    stack.callback(writer.close)
    responder = Responder(fleet=services.fleet, pool=services.pool, decoder=inputs.text.decoder)
    generator = _generator(config, inputs, responder)
    sampler = DynamicSampler(config.algorithm, generator.group, ledger, progress.sampler)
    stack.push_async_callback(sampler.close)
    return RunContext(
        config=config,
        inputs=inputs,
        run_dir=run_dir,
        console=console,
        services=services,
        ledger=ledger,
        writer=writer,
        health=_health(config, run_dir, progress),
        generator=generator,
        sampler=sampler,
        timeline=timeline,
        evaluator=Evaluator(
            config, text=inputs.text, heldout=inputs.heldout, responder=responder, folder=run_dir.path / EVALUATIONS
        ),
        objective=objective_of(config.algorithm),
        checkpoints=checkpoints,
        progress=progress,
        start_seconds=time.monotonic() - began,
    )


def _health(config: Config, run_dir: RunDir, progress: Progress) -> HealthMonitor:
    """It knows the steps up to the checkpoint: lines of later ones are superseded by what is done now."""
    limits = HealthLimits(mismatch_warn=config.monitor.mismatch_warn, mismatch_stop=config.monitor.mismatch_stop)
    done = [line for line in read_metrics(run_dir.path) if line["rollout_step"] <= progress.rollout_step]
    return HealthMonitor(done, limits)


def _mirror(config: Config, run_dir: RunDir, stack: AsyncExitStack) -> WandbMirror | None:
    if config.monitor.wandb.mode == "off":
        return None
    return stack.enter_context(WandbMirror(config.monitor.wandb, run_dir.path, flatten(asdict(config))))


def _generator(config: Config, inputs: Inputs, responder: Responder) -> GroupGenerator:
    sampling = SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        stop_token_ids=inputs.text.stop_token_ids,
    )
    return GroupGenerator(responder, inputs.prompts, sampling, config.algorithm, config.run.seed)


async def _progress(config: Config, run_dir: RunDir) -> Progress:
    if config.run.resume_step is not None:
        run_dir.go_back_to(config.run.resume_step)
    latest = run_dir.latest_checkpoint() if config.run.resume else None
    if latest is not None:
        return await load_counters(run_dir, latest)
    sampling = config.algorithm.dynamic_sampling
    # Four batches of memory: the share of useful groups changes within a few steps of a fast learner.
    rate = PassRate.start(sampling.initial_pass_rate, memory=4.0 * config.algorithm.prompts_per_step)
    state = SamplerState(cursor=0, pass_rate=rate, carried=())
    return Progress(rollout_step=0, optimizer_step=0, weight_version=0, sampler=state)


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
