"""The KL term's reference, where `algorithm.kl.reset_every` renews it (ProRL, arXiv 2505.24864).

It stands in `references/step_<N>` of the run directory, in Hugging Face format: a checkpoint names the step, and a
resume reads the same weights, bit for bit, into any layout. Written before the checkpoint of its step: what a kill
leaves without a checkpoint is written again.
"""

import asyncio
from contextlib import suppress
from pathlib import Path

from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.config.algorithm_config import KLConfig
from megatron_dapo.coordinator.checkpoints import load_progress
from megatron_dapo.monitor.timeline import StepTimer
from megatron_dapo.storage.durable import remove_folder, sync_tree
from megatron_dapo.storage.group_files import GroupFileError
from megatron_dapo.storage.run_dir import RunDir


def reference_folder(run_path: Path, step: int) -> Path:
    """Of the weights that became the reference after rollout step `step`."""
    return run_path / "references" / f"step_{step}"


async def reset_reference(trainer: Trainer, run_dir: RunDir, config: KLConfig, step: int, timer: StepTimer) -> bool:
    """If it is time, the weights after rollout step `step` become the reference. Whether it was. Earlier ones that no
    checkpoint names are removed."""
    if config.reset_every is None or step % config.reset_every:
        return False
    run_dir.check_there()
    folder = reference_folder(run_dir.path, step)
    with timer.measure("checkpoint"):
        await trainer.export_hf(folder)
        await asyncio.to_thread(sync_tree, folder)
        await trainer.reset_reference(optimizer=config.reset_optimizer)
        await asyncio.to_thread(_remove_unnamed, run_dir)
    return True


def _remove_unnamed(run_dir: RunDir) -> None:
    """Later ones than the checkpoints' stay: one that is under way may name them."""
    named = []
    for checkpoint in run_dir.checkpoints():
        with suppress(GroupFileError):
            named.append(load_progress(checkpoint.folder).reference_step)
    for each in (run_dir.path / "references").glob("step_*"):
        step = int(each.name.removeprefix("step_"))
        if step not in named and step < max(named, default=0):
            remove_folder(each)
