"""Both directions: Hugging Face folder -> Megatron distributed checkpoint, each worker streaming parameters into a file
of its own; and back, where the files are laid out first and every worker fills its part."""

import functools
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dapo.actor.checkpoint.checkpoint_files import (
    STATE_FILE,
    CheckpointDamagedError,
    check_whole,
    digest_of,
    put_in_place,
    state_text,
)
from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.actor.weights.hf_files import (
    FolderPlan,
    SafetensorsReader,
    WeightsError,
    copy_companions,
    partial_folder,
)
from megatron_dapo.actor.weights.model_tensors import check_weights, hf_shapes
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.config.base import ConfigError
from megatron_dapo.data.hub import local_path
from tools.conversion.adapters import Adapters
from tools.conversion.megatron_files import CheckpointReader, PartWriter, write_metadata
from tools.conversion.stored import Stored, extra_state_keys, in_dtype, share, stored_parameters
from tools.conversion.workers import Counter, Progress, run_parts
from tools.rank_pool import RankPlace, RankPool

COMPANIONS = "hf"
"""Folder in a converted checkpoint with the model's config and tokenizer, so that it converts back by itself."""

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
PLAIN_DTYPES = (*WEIGHT_DTYPES, torch.float16, torch.float64)


def to_megatron(
    source: Path, target: Path, *, tensor: int, dtype: torch.dtype | None, workers: int, pool: RankPool
) -> torch.dtype:
    """Write `target`, cut as `tensor` tensor-parallel ranks cut it; the type of its weights.

    Written aside and renamed. It loads at any layout; at that tensor-parallel size each rank reads only its own.

    Raises:
        WeightsError, ConfigError: the source is not a whole model, with the tensor's or field's name; or the disk has
            no room.
    """
    hf = HFModelConfig.load(source)
    check_layout(hf, layout_for(hf, tensor))
    parameters = stored_parameters(hf)
    with SafetensorsReader(source) as reader:
        check_weights(reader, hf)
        dtype = written_dtype({name: reader.dtype(name) for name in hf_shapes(hf)}, source, dtype)
    extra = extra_state_keys(parameters)
    total = sum(math.prod(stored.shape(tensor)) for stored in parameters) * dtype.itemsize
    progress = Progress("convert")
    with aside(target, total) as partial:
        partial.mkdir(parents=True)
        write = functools.partial(write_megatron_part, source, partial, extra, tensor, dtype)
        written = run_parts(pool, write, share(parameters, workers), progress, total)
        write_metadata(partial, parameters, extra, [results for results, _ in written], ranks=tensor, dtype=dtype)
        digests = {part_file(worker): digest for worker, (_, digest) in enumerate(written)}
        put_in_place(partial, target, digests | _write_small_files(partial, source, tensor))
    progress.close(f"{total / 1e6:.0f} MB written to {target}")
    return dtype


def layout_for(hf: HFModelConfig, tensor: int, pipeline: int = 1) -> LayoutConfig:
    """That of so many ranks; the tensor-parallel ones split a mixture's experts by number."""
    if hf.experts is None:
        return LayoutConfig(tensor=tensor, pipeline=pipeline)
    return LayoutConfig(tensor=tensor, pipeline=pipeline, sequence_parallel=tensor > 1, expert=tensor)


def part_file(worker: int) -> str:
    """As Megatron names the files of its ranks."""
    return f"__{worker}_0.distcp"


def write_megatron_part(
    source: Path,
    folder: Path,
    extra: list[str],
    ranks: int,
    dtype: torch.dtype,
    place: RankPlace,
    parameters: list[Stored],
    counter: Counter,
) -> tuple[list[WriteResult], str]:
    """One worker's file, the first one's with the keys `extra` of empty entries; one chunk is in memory at a time."""
    writer = PartWriter(folder / part_file(place.rank))
    for key in [] if place.rank else extra:
        writer.add(key, None, [None])
    with SafetensorsReader(source) as reader:
        for stored in parameters:
            for chunk in stored.chunks(ranks):
                tensor = stored.read(chunk, reader, ranks, dtype)
                writer.add(stored.key, stored.at + chunk.offset, tensor.view((1,) * stored.lead + chunk.shape))
                counter.add(place, tensor.nbytes)
    return writer.close()


def _write_small_files(partial: Path, source: Path, tensor: int) -> dict[str, str]:
    """What the checkpoint has besides weights, with checksums."""
    save_config(CheckpointingConfig("torch_dist", 1), str(partial))
    torch.save({}, partial / "common.pt")  # Megatron's file for values that are not sharded: there are none
    state = state_text(optimizer_steps=0, layout=LayoutConfig(tensor=tensor), distributed_optimizer=None)
    (partial / STATE_FILE).write_text(state)
    (partial / COMPANIONS).mkdir()
    copy_companions(source, partial / COMPANIONS)
    files = sorted(file for file in partial.rglob("*") if file.is_file() and file.suffix != ".distcp")
    return {str(file.relative_to(partial)): digest_of(file) for file in files}


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

    Written aside and renamed. `base` has config and tokenizer, and for adapters the weights; None: those of `base_of`.

    Raises:
        CheckpointDamagedError: a file of the checkpoint is missing or damaged.
        WeightsError: a tensor is missing, partial, or not that of the config.
        ConfigError: config and tokenizer are not known, adapters are for another base, or the disk has no room.
    """
    source = actor_folder(source)
    base = base or base_of(source)
    hf = HFModelConfig.load(base)
    progress = Progress("check")
    check_whole(source)
    progress.close("every file has the checksum of the manifest")
    progress = Progress("convert")
    parameters, extra = stored_parameters(hf), adapters_in(source)
    adapters = Adapters(source, base, extra) if extra else None
    dtype = written_dtype(adapters.dtypes if adapters else stored_dtypes(source, parameters), source, dtype)
    plan = FolderPlan(shapes=hf_shapes(hf), dtype=dtype, max_bytes=max_file_bytes)
    total = plan.total_bytes
    with aside(target, total) as partial:
        plan.create(partial)
        write = functools.partial(write_hf_part, source, partial, plan)
        if adapters:
            adapters.write_peft(partial)
            write = functools.partial(adapters.write_part, partial, plan)
        run_parts(pool, write, share(parameters, workers), progress, total)
        plan.finish(partial, target, base)
    progress.close(f"{total / 1e6:.0f} MB written to {target}")
    return dtype


def stored_dtypes(source: Path, parameters: list[Stored]) -> dict[str, torch.dtype]:
    """Of the parameters of the checkpoint `source`, each of which must be whole and of the config's shape."""
    reader = CheckpointReader(source)
    for stored in parameters:
        reader.check(stored)
    return {stored.key: reader.dtype(stored) for stored in parameters}


def write_hf_part(
    source: Path, partial: Path, plan: FolderPlan, place: RankPlace, parameters: list[Stored], counter: Counter
) -> None:
    """Put one worker's tensors in their places; one parameter at a time."""
    reader = CheckpointReader(source)
    for stored in parameters:
        for name, tensor in stored.full(reader.read(stored)).items():
            plan.write(partial, name, in_dtype(tensor, plan.dtype))
            counter.add(place, tensor.numel() * plan.dtype.itemsize)


def actor_folder(folder: Path) -> Path:
    """The trainer's part of a run's checkpoint `step_N`, or the folder itself.

    Raises:
        ConfigError: it has nothing of a checkpoint.
    """
    found = folder / "actor" if (folder / "actor").is_dir() else folder
    if not any((found / name).exists() for name in (STATE_FILE, ".metadata")):
        raise ConfigError(f"{folder}: no checkpoint; name RUN/checkpoints/step_N, or a folder that to-megatron wrote")
    return found


def adapters_in(folder: Path) -> dict[str, Any]:
    """What `actor.json` says of LoRA adapters, if they are all that the checkpoint holds."""
    file = folder / STATE_FILE
    try:
        extra: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["extra"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamagedError(f"{file} is missing or damaged ({error})") from None
    return extra if "lora" in extra else {}


def base_of(checkpoint: Path) -> Path:
    """Where config and tokenizer are: in a converted checkpoint, or where the config of its run says; a relative path
    begins where the run was started, or else here.

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
            text = str(yaml.safe_load(run_config.read_text(encoding="utf-8"))["model"]["path"])
        except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            raise ConfigError(f"{run_config}: says no model.path ({error!r}); give --base") from None
        model = Path(local_path(text, "--base"))
        began = Path()
        with suppress(OSError, ValueError, KeyError, TypeError):
            began = Path(json.loads(run_config.with_name("manifest.json").read_text(encoding="utf-8"))["folder"])
        for folder in (began / model, model):
            if folder.is_dir():
                return folder
        raise ConfigError(f"{run_config}: model.path = {model} is not here; give --base, a folder with that model")
    raise ConfigError(f"{checkpoint}: no checkpoints/step_N of a run; name one, or give --base, its model.path")


@contextmanager
def aside(target: Path, size: int) -> Iterator[Path]:
    """The folder that becomes `target`; not made yet.

    Args:
        size: bytes that will be written. A folder that stands at `target` keeps its own until the end.

    Raises:
        ConfigError: the disk has less room.
    """
    partial = partial_folder(target)
    shutil.rmtree(partial, ignore_errors=True)
    there = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise ConfigError(
            f"{target}: {size / 1e6:,.0f} MB are to be written, {free / 1e6:,.0f} MB are free in {there}; name a "
            "target on another disk"
        )
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def written_dtype(dtypes: Mapping[str, torch.dtype], source: Path, asked: torch.dtype | None) -> torch.dtype:
    """The type asked for, or else the one that all tensors have.

    Raises:
        WeightsError: they differ, or it is none that a model is trained in, or one holds no plain numbers (quantized
            weights mean nothing without their scales); with a tensor's name.
    """
    first = next(iter(dtypes.values()))
    for name, dtype in dtypes.items():
        where = f"{source}: tensor {name} has type {dtype}"
        if dtype not in PLAIN_DTYPES:
            raise WeightsError(f"{where}, as quantized weights have; give plain ones")
        if asked is None and dtype not in WEIGHT_DTYPES:
            raise WeightsError(f"{where}; give --dtype float32 or bfloat16")
        if asked is None and dtype != first:
            raise WeightsError(f"{where}, others {first}; give --dtype to make them one")
    return asked or first
