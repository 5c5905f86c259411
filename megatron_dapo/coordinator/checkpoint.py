"""One checkpoint: trainer, sampler and counters together, so that a resumed run knows of every prompt."""

from megatron_dapo.coordinator.parts import Parts
from megatron_dapo.coordinator.progress import Progress, save_progress
from megatron_dapo.data.ledger import Event


async def write_checkpoint(parts: Parts, progress: Progress) -> None:
    """Write it aside; it counts once its folder has its name.

    The ledger's event comes before the rename: a kill in between leaves an event without a folder, which the next
    resume voids. The other order would leave a folder that the ledger does not know.
    """
    run = parts.config.run
    aside = parts.run_dir.checkpoint_aside(progress.rollout_step)
    await parts.services.trainer.save_checkpoint(aside / "actor")
    save_progress(progress, aside)
    parts.services.ledger.record(
        Event.CHECKPOINT,
        rollout_step=progress.rollout_step,
        weight_version=progress.weight_version,
        optimizer_step=progress.optimizer_step,
    )
    parts.services.ledger.commit()
    parts.run_dir.publish_checkpoint(aside, progress.rollout_step, run.keep_checkpoints)
