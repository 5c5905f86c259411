"""`megatron-dapo slurm`: the batch script of a run."""

from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.config import load_config
from megatron_dapo.slurm.script import SlurmOptions, batch_script


def slurm_command(path: Path, overrides: Sequence[str], options: SlurmOptions, out: Path | None) -> None:
    """Write the script to `out`, or print it. Makes the folder that Slurm writes the job's output to."""
    config = load_config(path, overrides)
    text = batch_script(path, overrides, config, options)
    if out is None:
        print(text, end="")
        return
    out.write_text(text)
    (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)  # Slurm makes no folder
    print(f"sbatch {out}")
