"""What stands around a run: the signals that stop it, and the restarts after a trainer rank was lost."""

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_dapo.cluster.stop_signals import heeded_signals
from megatron_dapo.cluster.trainer import TrainerLost
from megatron_dapo.config import Config
from megatron_dapo.coordinator.inputs import Inputs
from megatron_dapo.coordinator.run import run
from megatron_dapo.monitor.console import Console
from megatron_dapo.storage.run_dir import CheckpointDamaged, newest_step


def run_blocking(config: Config, inputs: Inputs, console: Console) -> dict[str, Any]:
    """Run `config` to its end, through losses of trainer ranks. Returns what `summary.json` holds.

    The first stop signal saves and raises StopRequested; a second one cancels everything.
    """
    return asyncio.run(_with_signals(config, inputs, console))


async def _with_signals(config: Config, inputs: Inputs, console: Console) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()
    task = asyncio.ensure_future(run_with_restarts(config, inputs, console, stop))

    def on_signal(number: signal.Signals) -> None:
        if stop.done():
            task.cancel()
            return
        console.note(f"{number.name}: stopping; what was trained is saved first, a second signal ends at once")
        stop.set_result(None)

    for number in heeded_signals():
        loop.add_signal_handler(number, on_signal, number)
    return await task


async def run_with_restarts(
    config: Config, inputs: Inputs, console: Console, stop: "asyncio.Future[None]"
) -> dict[str, Any]:
    """`run`, begun again from the newest checkpoint when a trainer rank is lost, and from an older one when that is
    damaged and `run.on_damaged_checkpoint` says so.

    Raises:
        CheckpointDamaged: it does not say so, or no older one is intact.
        TrainerLost: more often than `run.max_restarts` times without a new checkpoint in between.
    """
    restarts, step = 0, newest_step(Path(config.run.dir))
    while True:
        try:
            return await run(config, inputs, console, stop)
        except CheckpointDamaged as error:
            if config.run.on_damaged_checkpoint == "stop" or error.intact is None:
                raise
            console.note(f"{error}\nstarting again from there, as run.on_damaged_checkpoint says")
            config = replace(config, run=replace(config.run, resume_step=error.intact))
        except TrainerLost as error:
            reached = newest_step(Path(config.run.dir))
            restarts = restarts + 1 if reached == step else 1
            step = reached
            if restarts > config.run.max_restarts:
                raise
            console.note(
                f"{error}\nstarting again after rollout step {step} (restart {restarts} of run.max_restarts = "
                f"{config.run.max_restarts} without a new checkpoint)"
            )
            config = replace(config, run=replace(config.run, resume=True, resume_step=None))
