"""Hugging Face folder -> Megatron distributed checkpoint: every worker streams parameters into a file of its own."""

import functools
import math
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dapo.actor.checkpoint.checkpoint_files import STATE_FILE, digest_of, put_in_place, state_text
from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.actor.weights.hf_files import SafetensorsReader, copy_companions
from megatron_dapo.actor.weights.hf_weights import hf_shapes, no_parameters
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.diagnostics.rank_pool import RankPlace, RankPool
from tools.conversion.megatron_files import PartWriter, write_metadata
from tools.conversion.stored import Stored, extra_state_keys, share, stored_parameters
from tools.conversion.target import COMPANIONS, aside, written_dtype
from tools.conversion.workers import Counter, Progress, run_parts


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
    check_layout(hf, LayoutConfig(tensor=tensor))
    parameters = stored_parameters(hf)
    with SafetensorsReader(source) as reader:
        reader.check(hf_shapes(hf), ignored=no_parameters(hf))
        dtype = written_dtype({name: reader.dtype(name) for name in hf_shapes(hf)}, source, dtype)
    extra = extra_state_keys(hf)
    total = sum(math.prod(stored.shape(tensor)) for stored in parameters) * dtype.itemsize
    progress = Progress("convert")
    with aside(target, total) as partial:
        partial.mkdir(parents=True)
        write = functools.partial(write_part, source, partial, extra, tensor, dtype)
        written = run_parts(pool, "write", write, share(parameters, workers), progress, total)
        write_metadata(partial, parameters, extra, [results for results, _ in written], ranks=tensor, dtype=dtype)
        digests = {part_file(worker): digest for worker, (_, digest) in enumerate(written)}
        put_in_place(partial, target, digests | _write_small_files(partial, source, tensor))
    progress.close(f"{total / 1e6:.0f} MB written to {target}")
    return dtype


def part_file(worker: int) -> str:
    """As Megatron names the files of its ranks."""
    return f"__{worker}_0.distcp"


def write_part(
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
            lead = () if stored.layer is None else (stored.layer,)
            for chunk in stored.chunks(ranks):
                tensor = stored.read(chunk, reader, ranks, dtype)
                writer.add(stored.key, lead + chunk.offset, tensor.view((1,) * len(lead) + chunk.shape))
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
