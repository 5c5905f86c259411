"""`megatron-dapo train` that also keeps each step's batch in `batches/step_N` of the run directory, for tests that look
at the tokens of what was trained."""

from megatron_dapo.cli.main import main
from megatron_dapo.cli.train import prepare_environment


def keep_batches() -> None:
    from megatron_dapo.coordinator import loop
    from megatron_dapo.storage.group_files import save_groups

    fill_batch = loop.fill_batch

    async def filled_and_kept(context, progress, timer):
        batch = await fill_batch(context, progress, timer)
        folder = context.run_dir.path / "batches" / f"step_{progress.rollout_step + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        save_groups(folder, "batch", batch.admission.kept, {})
        return batch

    loop.fill_batch = filled_and_kept


if __name__ == "__main__":
    prepare_environment()  # Ray reads its settings when it is imported
    keep_batches()
    main()
