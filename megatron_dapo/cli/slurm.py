"""`megatron-dapo slurm`: the batch script of a run."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.command_line import ConfigFile, Overrides
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.storage.run_dir import usable


def slurm(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Write the script here; printed otherwise.")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="0: a run on CPUs.")] = 8,
    cpus_per_node: Annotated[int, typer.Option(min=1)] = 64,
    nodes: Annotated[int | None, typer.Option(min=1, help="Otherwise as few as the run fits on.")] = None,
    time: Annotated[str, typer.Option(help="Time limit of one job; the run goes on in the next one.")] = "24:00:00",
    warn: Annotated[int | None, typer.Option(min=1, max=65535, help="Seconds left to save; else by the plan.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="More options of sbatch: --sbatch=--partition=h100")] = None,
    container: Annotated[str | None, typer.Option(help="Image for pyxis; a .sif file: for Apptainer.")] = None,
    mounts: Annotated[str | None, typer.Option(help="Mounts of the container: FROM:TO,...")] = None,
    setup: Annotated[list[str] | None, typer.Option(help='Shell line before the run: "module load cuda"')] = None,
) -> None:
    """Write the Slurm script of a run: Ray over all nodes, saving at the time limit, requeued until done."""
    from megatron_dapo.slurm.forecast import warning_and_notes
    from megatron_dapo.slurm.script import SlurmOptions, batch_script, limit_s, not_seen

    if container and (container.endswith(".sqsh") or os.path.isfile(container)):
        container = os.path.abspath(container)  # pyxis takes a name without a slash for one of a registry
    options = SlurmOptions(
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_per_node,
        nodes=nodes,
        time=time,
        sbatch=tuple(one if one.startswith("-") else f"--{one}" for one in sbatch or ()),
        container=container,
        mounts=mounts,
        setup=tuple(setup or ()),
        python_path=tuple(os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(":") if one),
    )
    loaded = load_config(config, overrides or [])
    warn, notes = warning_and_notes(loaded, warn, limit_s(time), gpus=gpus_per_node > 0)
    text = batch_script(config, overrides or [], loaded, options, warn)
    for note in (*notes, *not_seen(loaded)):
        print(f"note: {note}", file=sys.stderr)
    with usable(loaded.run.dir):
        (Path(loaded.run.dir) / "logs").mkdir(parents=True, exist_ok=True)  # Slurm makes no folder
    if out:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text)
        except OSError as error:
            raise ConfigError(f"--out {out}: {error.strerror}; name another place") from None
        text = f"sbatch {shlex.quote(str(out))}\n"
    print(text, end="")
