"""Everything a run is made of, started in the right order and closed in the opposite one."""

import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.algorithm.policy_loss import PolicyObjective
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config, dump_config
from megatron_dapo.config.config_diff import flatten
from megatron_dapo.coordinator.batch import objective_of
from megatron_dapo.coordinator.checkpoints import Checkpoints
from megatron_dapo.coordinator.inputs import Inputs
from megatron_dapo.coordinator.progress import Progress, load_counters
from megatron_dapo.coordinator.resume import check_resume, manifest, one_line
from megatron_dapo.coordinator.sampler import DynamicSampler, SamplerState
from megatron_dapo.coordinator.services import Services, start_services
from megatron_dapo.experience.evaluation import Answers, Evaluator
from megatron_dapo.experience.generator import GroupGenerator
from megatron_dapo.experience.responder import Responder
from megatron_dapo.monitor.console import Console
from megatron_dapo.monitor.health import HealthLimits, HealthMonitor
from megatron_dapo.monitor.statistics import EVALUATIONS
from megatron_dapo.monitor.timeline import Timeline
from megatron_dapo.monitor.weights_and_biases import WandbMirror
from megatron_dapo.monitor.writer import MetricsWriter, read_metrics
from megatron_dapo.storage.ledger import Event, Ledger
from megatron_dapo.storage.run_dir import RunDir
from rollout.generation import SamplingParams


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
    checkpoints = Checkpoints(config.run, run_dir, services, ledger, console)
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
    return GroupGenerator(
        responder=responder,
        prompts=inputs.prompts,
        sampling=SamplingParams(
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            stop_token_ids=inputs.text.stop_token_ids,
        ),
        group_size=config.algorithm.group_size,
        overlong=config.algorithm.overlong,
        seed=config.run.seed,
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
