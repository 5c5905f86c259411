"""`megatron-dapo slurm`: the batch script of a run."""

from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.slurm.script import SlurmOptions, batch_script


def slurm_command(path: Path, overrides: Sequence[str], options: SlurmOptions, out: Path | None) -> None:
    """Write the script to `out`, or print it. Makes the folder that Slurm writes the job's output to."""
    config = load_config(path, overrides)
    text = batch_script(path, overrides, config, options)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name another place") from None
    (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)  # Slurm makes no folder
    print(f"sbatch {out}")
