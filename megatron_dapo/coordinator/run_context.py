"""Everything a run is made of, started in the right order and closed in the opposite one."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.cluster import engines
from megatron_dapo.cluster.clients import Clients
from megatron_dapo.cluster.gpu_handover import GpuHandover
from megatron_dapo.cluster.placement import Placement, place
from megatron_dapo.cluster.ray_cluster import GCS, Cluster, gpu_here, joins_cluster
from megatron_dapo.cluster.trainer import WATCH_INTERVAL_S, CheckpointUnreadable, Trainer, TrainerError, TrainerLost
from megatron_dapo.cluster.waits import Waits, ready_after
from megatron_dapo.config import Config, dump_config
from megatron_dapo.config.load import flatten
from megatron_dapo.coordinator.checkpoints import Checkpoints, Progress, damaged_checkpoint, load_counters, with_rollout
from megatron_dapo.coordinator.inputs import Inputs, routing_shape
from megatron_dapo.coordinator.resume import check_resume, manifest
from megatron_dapo.coordinator.sampler import DynamicSampler, Refresh
from megatron_dapo.experience.evaluation import Evaluator
from megatron_dapo.experience.generator import GroupGenerator, PlayAll, Responder, gather_or_cancel
from megatron_dapo.experience.groups import SamplerState
from megatron_dapo.monitor.console import Console, Count
from megatron_dapo.monitor.health import HealthMonitor
from megatron_dapo.monitor.statistics import EVALUATIONS, Answers
from megatron_dapo.monitor.timeline import Timeline
from megatron_dapo.monitor.writer import AXES, MetricsWriter, WandbMirror, read_metrics
from megatron_dapo.storage.ledger import Event, Ledger
from megatron_dapo.storage.run_dir import RunDir, RunDirError
from reward.pool.pool import RewardPool
from rollout.fleet.fleet import RolloutFleet
from rollout.generation import SamplingParams

RAY_STOP_DEADLINE_S = 120.0
SERVERS_FIRST_S = 0.1
"""For the servers' processes to begin: they are the slowest to start, and this process can do nothing else while it
starts a Ray of its own."""


@dataclass(frozen=True, kw_only=True)
class RunBase:
    """What a run begins with."""

    config: Config
    inputs: Inputs
    run_dir: RunDir
    console: Console
    waits: Waits
    stack: AsyncExitStack
    """Closes what is started, in the opposite order."""


@dataclass(frozen=True, kw_only=True)
class RunContext(RunBase):
    """Everything a run is made of; used only by the loop and the functions it calls."""

    trainer: Trainer
    fleet: RolloutFleet
    handover: GpuHandover
    shared_gpu: bool
    """Whether a server of this machine shares a GPU with a trainer rank."""
    writer: MetricsWriter
    health: HealthMonitor
    generator: GroupGenerator
    sampler: DynamicSampler
    evaluator: Evaluator
    timeline: Timeline
    checkpoints: Checkpoints
    progress: Progress
    """Where the run stood when it started: at the beginning, or at the checkpoint it goes on from."""

    async def evaluate(self, name: str, *, forbid: int | None = None) -> dict[str, Answers]:
        """Held-out answers with the weights that the servers hold now; `forbid`: as Evaluator.run."""
        await self.handover.to_servers()
        what, deadline = f"held-out answers {name}", self.config.run.step_deadline_s
        answering, count = self.evaluator.run(name, forbid=forbid), self.evaluator.count
        return await self.waits.wait_for(what, "rollout servers", deadline, answering, stoppable=True, count=count)


async def start_run(run: RunBase) -> RunContext:
    """The started run. Raises what failed to start, with its own explanation."""
    config, inputs, run_dir, stack = run.config, run.inputs, run.run_dir, run.stack
    changes = check_resume(config, inputs, run_dir) if config.run.resume else []
    for change in changes:
        run.console.note(change)
    progress = await first_progress(config, run_dir)
    state = await asyncio.to_thread(with_rollout, progress, run_dir, changes, run.console)
    goes_on = state is not progress.sampler
    if config.rollout.deterministic:  # which tokens an interruption or a kill leaves depends on timing
        state = replace(state, unfinished=())
    ledger = Ledger(run_dir.ledger)
    stack.callback(ledger.close)
    if config.run.resume:
        told = f"resuming after rollout step {progress.rollout_step}"
        if not progress.rollout_step and not (run_dir.path / "manifest.json").exists():  # a batch script's first start
            told = "nothing to resume: a new run begins"
        run.console.note(told)
        at = {"rollout_step": progress.rollout_step, "weight_version": progress.weight_version}
        continued = [group.position for group in (*state.unfinished, *(group for group, _ in state.drawn))]
        ledger.record(Event.RESUMED, **at, continued=continued, changed=changes)
        ledger.commit()
    mirror, settings = None, flatten(asdict(config))
    if config.monitor.wandb.mode != "off":
        mirror = stack.enter_context(WandbMirror(config.monitor.wandb, run_dir.path, settings, run.console.note))
    pool = RewardPool(config.reward)
    stack.callback(pool.close)
    trainer, fleet, timeline, shared_gpu = await _services(run, progress, goes_on=goes_on)
    handover = GpuHandover(config.run, fleet, trainer, run.waits, report=run.console.aside)
    refresh, elsewhere = await _clients(run, fleet)
    checkpoints = Checkpoints(config.run, run_dir, trainer, handover, ledger, run.waits, run.console, refresh=refresh)
    await stack.enter_async_context(checkpoints)
    board, stand = config.monitor.tensorboard, {axis: getattr(progress, axis) for axis in AXES}
    writer = MetricsWriter(run_dir.path, tensorboard=board, mirror=mirror, done=stand, settings=settings)
    stack.callback(writer.close)
    # It knows the steps up to the checkpoint: lines of later ones are superseded by what is done now.
    done = [line for line in read_metrics(run_dir.path) if line["rollout_step"] <= progress.rollout_step]
    decoder, rules = inputs.text.decoder, inputs.rules
    responder = Responder(fleet=fleet, pool=pool, decoder=decoder, rules=rules, elsewhere=elsewhere)

    @cache
    def sampling(weight_version: int) -> SamplingParams:
        at = config.rollout.at_step(weight_version + 1)  # version v writes for step v + 1
        stop, limit = inputs.text.stop_token_ids, at.max_new_tokens
        drawn = SamplingParams(max_new_tokens=limit, temperature=at.temperature, top_p=at.top_p, stop_token_ids=stop)
        return replace(drawn, thinking=inputs.thinking)

    drawing = sampling, config.algorithm, config.run.seed, routing_shape(config, inputs.model)
    generator = GroupGenerator(responder, inputs.prompts, *drawing)
    stages = [stage.from_step for stage in config.rollout.stages]
    generator.restore(state.unfinished)
    kept = {"holding": fleet, "unfinished": generator.unfinished, "refresh": refresh}
    keeping: dict[str, Any] = {} if config.rollout.deterministic else kept
    algorithm, prompt_at = config.algorithm, generator.prompt_at
    sampler = DynamicSampler(algorithm, generator.group, ledger, state, prompt_at, stages, **keeping)
    stack.push_async_callback(sampler.close)
    folder = run_dir.path / EVALUATIONS
    return RunContext(
        **vars(run),
        trainer=trainer,
        fleet=fleet,
        handover=handover,
        shared_gpu=shared_gpu,
        writer=writer,
        health=HealthMonitor(done, config.monitor.mismatch_warn, config.algorithm.dynamic_sampling.filter),
        generator=generator,
        sampler=sampler,
        evaluator=Evaluator(config, text=inputs.text, heldout=inputs.heldout, responder=responder, folder=folder),
        timeline=timeline,
        checkpoints=checkpoints,
        progress=progress,
    )


async def _clients(run: RunBase, fleet: RolloutFleet) -> tuple[Refresh, PlayAll | None]:
    """What their processes have drawn, on call, and what plays in them; None: this process does."""
    config, inputs = run.config, run.inputs
    clients = Clients(fleet, run.console.aside, config.reward, inputs.text.decoder, inputs.rules, inputs.thinking)
    run.stack.push_async_callback(clients.close)
    await run.waits.wait_for("client start", "Ray", config.run.start_deadline_s, clients.start())
    return clients.refresh, clients.play if config.rollout.client_processes else None


async def _services(run: RunBase, progress: Progress, *, goes_on: bool) -> tuple[Trainer, RolloutFleet, Timeline, bool]:
    """Ray, trainer and servers, side by side where they can be; the record of what they do when; whether they share
    a GPU of this machine."""
    config, run_dir, note = run.config, run.run_dir, run.console.note
    ranks, asked = config.actor.layout.world_size, len(config.rollout.urls) or config.rollout.servers
    ray_too = "" if joins_cluster() else "Ray, "
    note(f"starting trainer and servers: {ray_too}{ranks} trainer rank(s), {asked} server(s)")
    placement: Placement | None = None
    if joins_cluster():
        use_gpu = _cluster(run).use_gpu
        servers = 0 if config.rollout.urls else config.rollout.servers
        placement = await place(config, run.waits, use_gpu=use_gpu, servers=servers)
    else:
        use_gpu = gpu_here(config.actor.device)
    trainer = Trainer(config, run.inputs.model, run_dir.path, run.waits, use_gpu=use_gpu)
    timeline = Timeline(run_dir.path, trainer, every=config.monitor.timeline_every)
    run.stack.callback(timeline.close)
    if placement is not None and placement.servers:
        ours = engines.placed_engines(config, run_dir.logs, placement, trainer, on_gpu=use_gpu)
        shared_gpu = False
    else:
        gpus = engines.visible_gpus(torch.cuda.device_count()) if use_gpu else ()
        theirs = engines.gpus_for_servers(config, gpus)
        ours = engines.own_engines(config, run_dir.logs, gpus=theirs)
        shared_gpu = bool(gpus) and {*theirs} == {*gpus}
    fleet = RolloutFleet(
        config.rollout,
        ours,
        vocab_size=run.inputs.text.vocab_size,
        report=run.console.aside,
        fp32_head=config.model.upcasts_head,
        routed_experts=config.actor.routing_replay,
        api_key=engines.api_key(config, run_dir.path),
        observe=timeline.served,
    )
    run.stack.callback((run_dir.path / engines.KEY_FILE).unlink, missing_ok=True)
    run.stack.push_async_callback(fleet.close)
    described = await _start_both(run, _start_trainer(run, trainer, fleet, placement, progress), fleet)
    if not goes_on:  # before the config: to a later start it would look like one of this
        run_dir.drop_rollout()
    run_dir.set_results_aside(progress.rollout_step)
    run_dir.write_text("config.yaml", dump_config(config))
    run_dir.write_json("manifest.json", manifest(config, run.inputs, described))
    plain = [f"{key.replace('_', ' ')} {value}" for key, value in described.items() if isinstance(value, str | int)]
    note(f"trainer: {', '.join(plain)}")
    for kernel, choice in described["kernels"].items():
        note(f"  {kernel}: {choice}")
    return trainer, fleet, timeline, shared_gpu


def _cluster(run: RunBase) -> Cluster:
    """Ray, whose loss ends every wait: the run then starts again with a new one."""
    config, waits = run.config, run.waits

    def end() -> None:
        with waits.blocking("Ray stop", "Ray", RAY_STOP_DEADLINE_S):
            cluster.close()

    async def until_lost() -> None:
        while not cluster.lost():
            await asyncio.sleep(WATCH_INTERVAL_S)
        lost = f"Ray's process {GCS} ended, and the trainer ranks cannot go on without it"
        waits.lose(TrainerLost(f"{lost}; logs: {run.run_dir.logs}"))

    with waits.blocking("Ray start", "Ray", config.run.start_deadline_s, count=lambda: Count(0, 1, "ready")):
        cluster = Cluster(processes=config.actor.layout.world_size, device=config.actor.device)
    run.stack.callback(end)
    run.stack.callback(asyncio.create_task(until_lost()).cancel)
    return cluster


async def _start_trainer(
    run: RunBase, trainer: Trainer, fleet: RolloutFleet, placement: Placement | None, progress: Progress
) -> dict[str, Any]:
    """All ranks built, with the weights that the run goes on from. Returns rank 0's description.

    `placement`: None starts a Ray of this machine's own first.
    """

    async def own_ray() -> None:
        await asyncio.sleep(SERVERS_FIRST_S)
        _cluster(run)

    if placement is None:
        await ready_after(run.console.note, "Ray", own_ray())
        run.stack.push_async_callback(fleet.close)  # before Ray's end, which may take its whole deadline
        placement = await place(run.config, run.waits, use_gpu=trainer.on_gpu, servers=0)
    run.stack.push_async_callback(trainer.close)
    described = await trainer.start(placement)
    if progress.reference_step and run.config.algorithm.kl.coefficient > 0:
        await trainer.load_reference(run.run_dir.reference(progress.reference_step))
    latest = run.run_dir.latest_checkpoint() if progress.rollout_step else None
    if latest is None:
        return described
    try:
        await trainer.load_checkpoint(latest.folder / "actor")
    except TrainerLost:
        raise
    except CheckpointUnreadable as error:
        raise await damaged_checkpoint(run.run_dir, latest, str(error)) from None
    except TrainerError as error:
        raise RunDirError(str(error)) from None
    return described


async def _start_both(run: RunBase, trainer: Awaitable[dict[str, Any]], fleet: RolloutFleet) -> dict[str, Any]:
    """Trainer and servers at once; the first failure ends the other. Returns the trainer's answer."""
    note, deadline = run.console.note, run.config.run.start_deadline_s
    building = asyncio.ensure_future(ready_after(note, "trainer", trainer))
    if run.config.run.mode == "colocated":
        # First, and out of the memory again: a server takes its share of what is free when it starts.
        await building
    # The fleet has the same deadline and the better explanation: it gets the first word.
    count, wanted = partial(engines.servers_ready, fleet), fleet.start(deadline)
    starting = run.waits.wait_for("server start", "SGLang servers", deadline + 30, wanted, count=count)
    await gather_or_cancel([building, ready_after(note, "servers", starting)])
    return building.result()


async def first_progress(config: Config, run_dir: RunDir) -> Progress:
    """Where the run begins, or goes on. Nothing is changed unless the checkpoint can be used."""
    step, found = config.run.resume_step, run_dir.checkpoints() if config.run.resume else []
    chosen = [checkpoint for checkpoint in found if step in (None, checkpoint.step)][-1:]
    progress = await load_counters(run_dir, chosen[0], config.actor) if chosen else None
    if step is not None:
        run_dir.go_back_to(step)
    if progress is not None:
        return progress
    sampling = config.algorithm.dynamic_sampling
    # Four batches of memory: the share of useful groups changes within a few steps of a fast learner.
    rate = PassRate.start(sampling.initial_pass_rate, memory=4.0 * config.algorithm.prompts_per_step)
    state = SamplerState(cursor=0, pass_rate=rate, carried=())
    return Progress(rollout_step=0, optimizer_step=0, weight_version=0, sampler=state)
