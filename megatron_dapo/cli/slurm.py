"""`megatron-dapo slurm`: the batch script of a run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.slurm.script import SlurmOptions, batch_script


def slurm_command(path: Path, overrides: Sequence[str], options: SlurmOptions, out: Path | None) -> ExitCode:
    """Write the script to `out`, or print it. Makes the folder that Slurm writes the job's output to."""
    try:
        config = load_config(path, overrides)
        text = batch_script(path, overrides, config, options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG
    if out is None:
        print(text, end="")
        return ExitCode.FINISHED
    try:
        out.write_text(text)
        (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)  # Slurm makes no folder
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return ExitCode.CONFIG
    print(f"sbatch {out}")
    return ExitCode.FINISHED
