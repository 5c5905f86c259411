"""The KL term's reference, where `algorithm.kl.reset_every` renews it (ProRL, arXiv 2505.24864).

It stands in `references/step_<N>` of the run directory, in Hugging Face format: a checkpoint names the step, and a
resume reads the same weights, bit for bit, into any layout. Written before the checkpoint of its step: what a kill
leaves without a checkpoint is written again.
"""

from pathlib import Path

from megatron_dapo.cluster.trainer import Trainer
from megatron_dapo.config.algorithm_config import KLConfig
from megatron_dapo.monitor.timeline import StepTimer
from megatron_dapo.storage.durable import remove_folder, sync_tree
from megatron_dapo.storage.run_dir import RunDir


def reference_folder(run_path: Path, step: int) -> Path:
    """Of the weights that became the reference after rollout step `step`."""
    return run_path / "references" / f"step_{step}"


async def reset_reference(trainer: Trainer, run_dir: RunDir, config: KLConfig, step: int, timer: StepTimer) -> bool:
    """If it is time, the weights after rollout step `step` become the reference. Whether it was. Earlier ones that no
    checkpoint needs are removed."""
    if config.reset_every is None or step % config.reset_every:
        return False
    run_dir.check_there()
    folder = reference_folder(run_dir.path, step)
    with timer.measure("checkpoint"):
        await trainer.export_hf(folder)
        sync_tree(folder)
        await trainer.reset_reference(optimizer=config.reset_optimizer)
    kept = [checkpoint.step for checkpoint in run_dir.checkpoints()]
    there = sorted(int(each.name.removeprefix("step_")) for each in folder.parent.glob("step_*"))
    needed = max((each for each in there if each <= min(kept, default=0)), default=0)
    for each in there:
        if each < needed:
            remove_folder(reference_folder(run_dir.path, each))
    return True
