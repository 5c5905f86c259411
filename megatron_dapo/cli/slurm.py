"""`megatron-dapo slurm`: the batch script of a run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.slurm.forecast import warning_and_notes
from megatron_dapo.slurm.script import SlurmOptions, batch_script


def slurm_command(
    path: Path, overrides: Sequence[str], options: SlurmOptions, warn_s: int | None, out: Path | None
) -> None:
    """Write the script to `out`, or print it. Makes the folder that Slurm writes the job's output to."""
    config = load_config(path, overrides)
    warn_s, notes = warning_and_notes(config, warn_s, gpus=options.gpus_per_node > 0)
    text = batch_script(path, overrides, config, options, warn_s)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)  # Slurm makes no folder
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name another place") from None
    print(f"sbatch {out}")
