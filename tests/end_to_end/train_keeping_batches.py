"""`megatron-dapo train` that also keeps each step's batch, and what its tokens were trained with, in `batches/step_N`
of the run directory, for tests that look at the tokens of what was trained."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.cli.main import main
from megatron_dapo.cli.train import prepare_environment


def keep_batches() -> None:
    from megatron_dapo.coordinator import loop
    from megatron_dapo.storage.group_files import save_groups

    fill_batch, update_actor = loop.fill_batch, loop.update_actor

    async def filled_and_kept(context, progress, timer):
        batch = await fill_batch(context, progress, timer)
        folder = context.run_dir.path / "batches" / f"step_{progress.rollout_step + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        save_groups(folder, "batch", batch.admission.kept, {})
        return batch

    async def updated_and_kept(trainer, config, batch, step, *others):
        updates, correction = await update_actor(trainer, config, batch, step, *others)
        arrays, kept = batch.arrays, dict[str, Any](old=batch.old.log_probs)
        kept |= {"rollout": arrays.rollout_log_probs, "versions": arrays.weight_versions}
        kept |= {"lengths": arrays.responses.response_lengths}
        kept |= {} if correction is None else {"correction": correction.weights.numpy()}
        np.savez(Path(config.run.dir) / "batches" / f"step_{step}" / "tokens.npz", **kept)
        return updates, correction

    loop.fill_batch, loop.update_actor = filled_and_kept, updated_and_kept


if __name__ == "__main__":
    prepare_environment()  # Ray reads its settings when it is imported
    keep_batches()
    main()
