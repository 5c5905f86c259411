"""Everything a run is made of, started in the right order and closed in the opposite one."""

import asyncio
import json
import platform
import sys
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.config import Config, dump_config
from megatron_dapo.config.compare import flatten
from megatron_dapo.coordinator.batch import objective_of
from megatron_dapo.coordinator.checkpoint import Checkpoints
from megatron_dapo.coordinator.cluster import GCS, Cluster
from megatron_dapo.coordinator.damage import damaged, load_counters
from megatron_dapo.coordinator.engines import api_key, key_file, own_engines, placed_engines, visible_gpus
from megatron_dapo.coordinator.evaluation import Evaluator
from megatron_dapo.coordinator.generator import GroupGenerator
from megatron_dapo.coordinator.inputs import Inputs
from megatron_dapo.coordinator.placement import Placement, place
from megatron_dapo.coordinator.progress import Progress
from megatron_dapo.coordinator.responder import Responder
from megatron_dapo.coordinator.resume import check_resume
from megatron_dapo.coordinator.run_dir import RunDir, RunDirError
from megatron_dapo.coordinator.sampler import DynamicSampler, SamplerState
from megatron_dapo.coordinator.timeline import Timeline
from megatron_dapo.coordinator.trainer import WATCH_INTERVAL_S, DamageFound, Trainer, TrainerError, TrainerLost
from megatron_dapo.coordinator.turns import Turns
from megatron_dapo.coordinator.waits import Waits
from megatron_dapo.data.ledger import Event, Ledger
from megatron_dapo.monitor.at_k import EVALUATIONS
from megatron_dapo.monitor.console import Console
from megatron_dapo.monitor.weights_and_biases import WandbMirror
from megatron_dapo.monitor.writer import MetricsWriter
from reward.pool import RewardPool
from rollout.fleet import RolloutFleet
from rollout.messages import SamplingParams
from rollout.server import LocalServer

RAY_STOP_DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Services:
    """What answers the coordinator, and the two books it keeps: of prompts and of waits."""

    trainer: Trainer
    fleet: RolloutFleet
    pool: RewardPool
    ledger: Ledger
    waits: Waits
    turns: Turns


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything a run is made of; used only by the loop and the functions it calls."""

    config: Config
    inputs: Inputs
    run_dir: RunDir
    console: Console
    services: Services
    writer: MetricsWriter
    generator: GroupGenerator
    sampler: DynamicSampler
    evaluator: Evaluator
    timeline: Timeline
    objective: PolicyObjective
    checkpoints: Checkpoints
    progress: Progress
    """Where the run stood when it started: at the beginning, or at the checkpoint it goes on from."""
    start_seconds: float
    key_file: Path | None
    """With the API key of the servers."""
    shared_gpu: bool
    """Whether a server shares a GPU with a trainer rank."""


async def start_parts(
    config: Config, inputs: Inputs, run_dir: RunDir, console: Console, stack: AsyncExitStack, waits: Waits
) -> Parts:
    """Start Ray, trainer, servers and reward workers side by side; `stack` closes them.

    Raises:
        Whatever part failed to start, with its own explanation; the others are closed by `stack`.
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
    if by_ray:
        engines = placed_engines(config, run_dir.logs, placement, trainer, on_gpu=cluster.use_gpu)
    else:
        engines = own_engines(config, run_dir.logs, gpus=gpus)
    key = api_key(config, run_dir.path)
    timeline = Timeline(run_dir.path, every=config.monitor.timeline_every)
    stack.callback(timeline.close)
    fleet = RolloutFleet(
        config.rollout,
        engines,
        vocab_size=inputs.text.vocab_size,
        report=console.note,
        api_key=key,
        observe=timeline.served if config.monitor.timeline_every else None,
    )
    stack.push_async_callback(fleet.close)
    timeline.follow(trainer)
    building = _start_trainer(trainer, placement, progress, run_dir)
    described = await _start_both(config, building, fleet, waits)
    run_dir.write_text("config.yaml", dump_config(config))
    run_dir.write_json("manifest.json", _manifest(config, inputs, described))
    console.note(_one_line(described))
    for part, choice in described["kernels"].items():
        console.note(f"  {part}: {choice}")
    checkpoints = Checkpoints(config.run, run_dir, trainer, ledger, waits, console)
    await stack.enter_async_context(checkpoints)
    turns = Turns(config.run, fleet, trainer.device_memory, waits, report=console.note)
    services = Services(ledger=ledger, pool=pool, fleet=fleet, trainer=trainer, waits=waits, turns=turns)
    writer = MetricsWriter(run_dir.path, tensorboard=config.monitor.tensorboard, mirror=mirror)
    stack.callback(writer.close)
    generator = _generator(config, inputs, services)
    sampler = DynamicSampler(config.algorithm, generator.group, ledger, progress.sampler)
    stack.push_async_callback(sampler.close)
    return Parts(
        config=config,
        inputs=inputs,
        run_dir=run_dir,
        console=console,
        services=services,
        writer=writer,
        generator=generator,
        sampler=sampler,
        timeline=timeline,
        evaluator=_evaluator(config, inputs, services, run_dir),
        objective=objective_of(config.algorithm),
        checkpoints=checkpoints,
        progress=progress,
        start_seconds=time.monotonic() - began,
        key_file=key_file(config, run_dir.path),
        shared_gpu=any(isinstance(engine, LocalServer) and engine.spec.gpus == gpus[:1] != () for engine in engines),
    )


def _end_cluster(cluster: Cluster, waits: Waits) -> None:
    with waits.blocking("Ray stop", "Ray", RAY_STOP_DEADLINE_S):
        cluster.close()


async def _until_cluster_lost(cluster: Cluster, waits: Waits, logs: Path) -> None:
    """Ends every wait as soon as this run's own Ray is lost; the run then starts again with a new one."""
    while not cluster.lost():
        await asyncio.sleep(WATCH_INTERVAL_S)
    waits.lose(TrainerLost(f"Ray's process {GCS} ended, and the trainer ranks cannot go on without it; logs: {logs}"))


def _mirror(config: Config, run_dir: RunDir, stack: AsyncExitStack) -> WandbMirror | None:
    if config.monitor.wandb.mode == "off":
        return None
    return stack.enter_context(WandbMirror(config.monitor.wandb, run_dir.path, flatten(asdict(config))))


def _sampling(config: Config, inputs: Inputs) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        stop_token_ids=inputs.text.stop_token_ids,
    )


def _generator(config: Config, inputs: Inputs, services: Services) -> GroupGenerator:
    return GroupGenerator(
        fleet=services.fleet,
        pool=services.pool,
        decoder=inputs.text.decoder,
        prompts=inputs.prompts,
        sampling=_sampling(config, inputs),
        group_size=config.algorithm.group_size,
        overlong=config.algorithm.overlong,
        seed=config.run.seed,
    )


def _evaluator(config: Config, inputs: Inputs, services: Services, run_dir: RunDir) -> Evaluator:
    prompts = inputs.heldout.prompts[: config.evaluation.limit or None]
    responder = Responder(
        fleet=services.fleet, pool=services.pool, decoder=inputs.text.decoder, prompts=prompts, seed=config.run.seed
    )
    return Evaluator(
        config=config.evaluation,
        responder=responder,
        prompts=prompts,
        sampling=_sampling(config, inputs),
        folder=run_dir.path / EVALUATIONS,
    )


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
    except DamageFound as error:
        raise await damaged(run_dir, latest, str(error)) from None
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


def _manifest(config: Config, inputs: Inputs, trainer: dict[str, Any]) -> dict[str, Any]:
    names = ("megatron-dapo", "megatron-core", "sglang", "ray", "torch", "transformers", "transformer-engine")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {name: _version(name) for name in names} | {"python": platform.python_version()},
        "host": {"name": platform.node(), "system": platform.platform(), "processor": platform.processor()},
        "command": sys.argv,
        "trainer": trainer,
        "model": {
            "path": config.model.path,
            "config": json.loads((Path(config.model.path) / "config.json").read_text()),
        },
        "data": {
            "train": {
                "path": config.data.path or [source.path for source in config.data.mixture],
                "sha256": inputs.prompts.content_hash,
                "rows": inputs.prompts.summary(),
            },
            "heldout": {
                "path": config.evaluation.path,
                "sha256": inputs.heldout.content_hash,
                "rows": inputs.heldout.summary(),
            },
        },
        "stop_token_ids": list(inputs.text.stop_token_ids),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _one_line(described: dict[str, Any]) -> str:
    return "trainer: " + ", ".join(f"{key} {value}" for key, value in described.items() if isinstance(value, str | int))
