"""Megatron distributed checkpoint -> Hugging Face folder: the files are laid out, then every worker fills its part."""

import functools
from pathlib import Path

import torch
import yaml

from megatron_dapo.actor.checkpoint.checkpoint_files import check_whole
from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.weights.hf_files import FolderPlan
from megatron_dapo.actor.weights.hf_weights import hf_shapes
from megatron_dapo.config.base import ConfigError
from megatron_dapo.diagnostics.rank_pool import RankPlace, RankPool
from tools.conversion.megatron_files import CheckpointReader
from tools.conversion.stored import Stored, in_dtype, share, stored_parameters
from tools.conversion.target import COMPANIONS, aside, written_dtype
from tools.conversion.workers import Counter, Progress, run_parts


def to_hf(
    source: Path,
    target: Path,
    *,
    base: Path | None,
    max_file_bytes: int,
    dtype: torch.dtype | None,
    workers: int,
    pool: RankPool,
) -> torch.dtype:
    """Write the model part of the checkpoint `source` to `target`; the type of its weights.

    Written aside and renamed. `base` has config and tokenizer; None: those of `base_of`.

    Raises:
        CheckpointDamagedError: a file of the checkpoint is missing or damaged.
        WeightsError: a tensor is missing, partial, or not that of the config.
        ConfigError: config and tokenizer are not known, or the disk has no room.
    """
    source = actor_folder(source)
    base = base or base_of(source)
    hf = HFModelConfig.load(base)
    progress = Progress("check")
    check_whole(source)
    progress.close("every file has the checksum of the manifest")
    progress = Progress("convert")
    parameters = stored_parameters(hf)
    reader = CheckpointReader(source)
    for stored in parameters:
        reader.check(stored)
    dtype = written_dtype({stored.key: reader.dtype(stored) for stored in parameters}, source, dtype)
    plan = FolderPlan(shapes=hf_shapes(hf), dtype=dtype, max_bytes=max_file_bytes)
    total = plan.total_bytes
    with aside(target, total) as partial:
        plan.create(partial)
        write = functools.partial(write_part, source, partial, plan)
        run_parts(pool, "write", write, share(parameters, workers), progress, total)
        plan.finish(partial, target, base)
    progress.close(f"{total / 1e6:.0f} MB written to {target}")
    return dtype


def write_part(
    source: Path, partial: Path, plan: FolderPlan, place: RankPlace, parameters: list[Stored], counter: Counter
) -> None:
    """Put one worker's tensors in their places; one parameter at a time."""
    reader = CheckpointReader(source)
    for stored in parameters:
        for name, tensor in stored.full(reader.read(stored)).items():
            plan.write(partial, name, in_dtype(tensor, plan.dtype))
            counter.add(place, tensor.numel() * plan.dtype.itemsize)


def actor_folder(folder: Path) -> Path:
    """The trainer's part of a run's checkpoint `step_N`, or the folder itself."""
    return folder / "actor" if (folder / "actor").is_dir() else folder


def base_of(checkpoint: Path) -> Path:
    """Where config and tokenizer are: in a converted checkpoint, or where the config of its run says.

    Raises:
        ConfigError: neither is there, or that config cannot be read.
    """
    if (checkpoint / COMPANIONS).is_dir():
        return checkpoint / COMPANIONS
    # <run>/checkpoints/step_N/actor
    above = checkpoint.absolute().parents
    run_config = above[2] / "config.yaml" if len(above) > 2 else None
    if run_config is not None and run_config.is_file():
        try:
            return Path(yaml.safe_load(run_config.read_text(encoding="utf-8"))["model"]["path"])
        except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            raise ConfigError(f"{run_config}: says no model.path ({error!r}); give --base") from None
    raise ConfigError(f"{checkpoint}: give --base, the model.path of the run (config and tokenizer are not in here)")
