"""A whole run: start everything, measure, train, measure again, export, sum up; begun again when a rank is lost."""

import asyncio
import gc
import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_dapo.cluster.heartbeat import heartbeat, refuse_live_elsewhere
from megatron_dapo.cluster.placement import PlacementError
from megatron_dapo.cluster.trainer import TrainerLost
from megatron_dapo.cluster.waits import Waits
from megatron_dapo.config import Config
from megatron_dapo.coordinator.checkpoints import Progress
from megatron_dapo.coordinator.inputs import Inputs
from megatron_dapo.coordinator.loop import train
from megatron_dapo.coordinator.publish import publish_weights
from megatron_dapo.coordinator.resume import BEFORE
from megatron_dapo.coordinator.run_context import RunBase, RunContext, start_run
from megatron_dapo.monitor.console import WHOLE, Console, Count
from megatron_dapo.monitor.timeline import PHASES, StepTimer
from megatron_dapo.monitor.writer import AXES, read_metrics
from megatron_dapo.storage.durable import sync_tree
from megatron_dapo.storage.run_dir import STOP_FILE, CheckpointDamaged, RunDir, RunDirError, newest_step

STOP_FILE_INTERVAL_S = 1.0
PLACE_AGAIN_S = 10.0

GC_THRESHOLDS = (20_000, 20, 100)
"""New containers before a collection of the young generation, young collections before a middle one, middle ones
before a full one."""

EXAMPLES = 3
"""Held-out problems shown with their answers before and after."""


async def run_with_restarts(
    config: Config, inputs: Inputs, console: Console, stop: "asyncio.Future[None]"
) -> dict[str, Any]:
    """`run`, begun again from the newest checkpoint when a trainer rank is lost, and from an older one when that is
    damaged and `run.on_damaged_checkpoint` says so.

    Raises:
        PlacementError: there is no room, after the loss of a rank for longer than `run.start_deadline_s`.
        CheckpointDamaged: it does not say so, or no older one is intact.
        TrainerLost: more often than `run.max_restarts` times without a new checkpoint in between.
    """
    restarts, step, lost = 0, newest_step(Path(config.run.dir)), 0.0
    while True:
        try:
            return await run(config, inputs, console, stop)
        except CheckpointDamaged as error:
            if config.run.on_damaged_checkpoint == "stop" or error.intact is None:
                raise
            console.note(f"{error}\nstarting again from there, as run.on_damaged_checkpoint says")
            config = replace(config, run=replace(config.run, resume_step=error.intact))
        except PlacementError as error:
            if not restarts or time.monotonic() > lost + config.run.start_deadline_s:
                raise
            console.note(f"{error}\na node may be on its way in place of the lost one; looking again")
            await asyncio.wait([stop], timeout=PLACE_AGAIN_S)
        except TrainerLost as error:
            reached = newest_step(Path(config.run.dir))
            restarts = restarts + 1 if reached == step else 1
            step, lost = reached, time.monotonic()
            if restarts > config.run.max_restarts:
                raise
            count = f"restart {restarts} of run.max_restarts = {config.run.max_restarts} without a new checkpoint"
            console.note(f"{error}\nstarting again after rollout step {step} ({count})")
            config = replace(config, run=replace(config.run, resume=True, resume_step=None))


async def run(config: Config, inputs: Inputs, console: Console, stop: "asyncio.Future[None]") -> dict[str, Any]:
    """Run `config` to its end. Returns what `summary.json` holds.

    Everything that was started is closed on every way out: success, error, cancellation.

    Args:
        stop: done when the run is asked to stop.

    Raises:
        StopRequested: it was; what had been trained is in a checkpoint.
    """
    timer = StepTimer()
    async with _Closing(console) as stack:
        run_dir = RunDir(config.run.dir, resume=config.run.resume)
        stack.callback(run_dir.close)
        stack.callback(console.close)
        console.note(f"run directory: {run_dir.path}")
        stack.callback(asyncio.create_task(stop_on_file(run_dir.path / STOP_FILE, stop, console)).cancel)
        if done := _finished(config, run_dir):
            console.note(f"this run is finished after {done['rollout_steps']} steps; to go on, raise run.rollout_steps")
            return done
        waits = Waits(stop)
        await refuse_live_elsewhere(run_dir)
        beat = await stack.enter_async_context(heartbeat(run_dir.path, waits, config.run.rollout_steps, console))
        base = RunBase(config=config, inputs=inputs, run_dir=run_dir, console=console, waits=waits, stack=stack)
        # Everything that is started has a deadline and a name of its own; this one bounds only what is between them.
        deadline = config.run.start_deadline_s + config.run.step_deadline_s + 60
        with timer.measure("start"):
            context = await waits.wait_for("start", "trainer and servers", deadline, start_run(base), stoppable=True)
        console.run = {WHOLE: Count(context.progress.rollout_step, config.run.rollout_steps, "rollout steps")}
        tune_collector()
        await publish_weights(context, context.progress.weight_version)
        summary = await _measure_and_train(context, timer, beat.earlier_s)
        run_dir.write_json("summary.json", summary)
    console.summary(summary)
    if config.run.export_at_end:
        first = (*inputs.heldout.prompts, *inputs.prompts.prompts)[0]
        console.note(f"ask the trained model:\n  {ask_command(run_dir.path / 'model', first.text)}")
    console.note(f"pictures: megatron-dapo report {shlex.quote(str(run_dir.path))}")
    return summary


class _Closing(AsyncExitStack):
    """What fails while a run is closed that ends with an error is reported, and does not take the error's place."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    async def __aexit__(self, *about: Any) -> bool | None:
        try:
            return await super().__aexit__(*about)
        except Exception as error:
            if about[1] is None or error is about[1]:
                raise
            self._console.aside(f"while the run was closed: {type(error).__name__}: {error}")
            return False


def tune_collector() -> None:
    """Freeze what exists when everything has been started, and let the collector run hardly ever within a step.

    At the paper's size some 10^4 requests are under way at once. With Python's default thresholds the collector would
    scan all their objects about thirty times a step, although reference counting frees nearly all of them. After a
    restart, what was frozen before is collected once: the error of the failed attempt still refers to it.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def _measure_and_train(context: RunContext, timer: StepTimer, earlier_s: float) -> dict[str, Any]:
    config, first = context.config, context.progress.rollout_step
    if context.progress.rollout_step == 0:
        with timer.measure("evaluation_before"):
            stored: dict[str, Any] = {"before": await _heldout(context, "before"), "baseline": await _baseline(context)}
            _show(context, context.progress, stored["before"])
            context.run_dir.write_json(BEFORE, stored)
    else:
        stored = context.run_dir.read_json(BEFORE)
    with timer.measure("training"):
        progress = await train(context, context.progress)
    with timer.measure("evaluation_after"):
        answers = stored | {"after": await _heldout(context, "after")}
        _show(context, progress, answers["after"])
    if config.run.export_at_end:
        await export_model(context)
    lines = read_metrics(context.run_dir.path)
    earlier = sum(line["timing/step"] for line in lines if line["rollout_step"] <= first)  # of earlier starts
    seconds = timer.seconds()
    seconds["total"] = max(earlier, earlier_s) + seconds["step"]
    seconds |= {phase: sum(line[f"timing/{phase}"] for line in lines) for phase in (*PHASES, "step")}
    return {
        "rollout_steps": progress.rollout_step,
        "optimizer_steps": progress.optimizer_step,
        "seed": config.run.seed,
        "heldout": {
            when: {mode: found["figures"] for mode, found in modes.items()} if modes else None
            for when, modes in answers.items()
        },
        "tokens": {name: sum(line[f"tokens/{name}"] for line in lines) for name in ("generated", "trained")},
        "seconds": seconds,
        "examples": _examples(context.inputs, answers) if answers["before"] else [],
    }


async def export_model(context: RunContext) -> None:
    """Write the trained model. On disk when this returns: the summary that follows says that the run is finished, and a
    resume then writes nothing again."""
    folder = context.run_dir.path / "model"
    await context.handover.to_trainer()
    await context.trainer.export_hf(folder)
    sync_tree(folder)


async def _heldout(context: RunContext, name: str, forbid: int | None = None) -> dict[str, dict[str, Any]]:
    """An evaluation by decoding mode, as JSON can hold it; {} where nothing is held out."""
    if not context.inputs.heldout.prompts:
        return {}
    if forbid is None:
        context.console.note(f"held-out problems {name} training")
    return {mode: asdict(found) for mode, found in (await context.evaluate(name, forbid=forbid)).items()}


def _show(context: RunContext, progress: Progress, answers: Mapping[str, dict[str, Any]]) -> None:
    """The evaluation before or after training in TensorBoard and W&B: it is in no line of metrics.jsonl."""
    found = {f"evaluation/{mode}": answer["figures"]["accuracy"] for mode, answer in answers.items()}
    context.writer.show({axis: getattr(progress, axis) for axis in AXES}, found)


async def _baseline(context: RunContext) -> dict[str, dict[str, Any]] | None:
    start = context.config.evaluation.forbidden_start
    if start is None or not context.inputs.heldout.prompts:
        return None
    context.console.note(f"the same without guessing: no answer may begin with {start!r} (evaluation.forbidden_start)")
    return await _heldout(context, "baseline", context.inputs.text.tokenizer.encode(start, add_special_tokens=False)[0])


def _finished(config: Config, run_dir: RunDir) -> dict[str, Any] | None:
    """The summary of a run that is to be resumed but has nothing left to do: a later job of a chain, say."""
    if config.run.resume and config.run.resume_step is None:
        with suppress(RunDirError):  # not there; or damaged: measured again from the newest checkpoint
            summary = run_dir.read_json("summary.json", "rollout_steps", "heldout")
            return summary if summary["rollout_steps"] >= config.run.rollout_steps else None
    return None


async def stop_on_file(file: Path, stop: "asyncio.Future[None]", console: Console) -> None:
    """Ask the run to stop when `file` appears: a batch script reaches a run in a container by no other way. One that
    came while the run read its data counts; `train` has removed an earlier one."""
    while not os.path.exists(file):  # false also where a share gives no answer
        await asyncio.sleep(STOP_FILE_INTERVAL_S)
    why = f"{file} is there"
    with suppress(OSError):
        if file.stat().st_size:  # the batch script's; a user's own, which may follow, is empty
            why = "Slurm's warning before the time limit"
            file.unlink()
    if not stop.done():
        console.note(f"{why}: stopping; what was trained is saved first")
        stop.set_result(None)


def _examples(inputs: Inputs, answers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first held-out problems, with the first response before and after, greedy where that was measured: so does
    `ask` answer. Not picked by outcome."""
    before, after = (found.get("greedy") or found["sampled"] for found in (answers["before"], answers["after"]))
    count = min(EXAMPLES, len(before["texts"]))
    return [
        {"prompt": prompt.text, "answer": prompt.answer}
        | {"before": before["texts"][at], "before_correct": before["correct"][at]}
        | {"after": after["texts"][at], "after_correct": after["correct"][at]}
        for at, prompt in enumerate(inputs.heldout.prompts[:count])
    ]


def ask_command(model: Path, prompt: str) -> str:
    """A command that a person can paste."""
    program, here = Path(sys.executable).with_name("megatron-dapo"), f"{Path.cwd()}/"
    words = [str(program).removeprefix(here), "ask", str(model).removeprefix(here), "--template", "plain", prompt]
    return shlex.join(words)
