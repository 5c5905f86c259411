"""Hugging Face folder -> Megatron distributed checkpoint: every worker streams parameters into a file of its own."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dapo.actor.checkpoint.checkpoint import CheckpointState
from megatron_dapo.actor.checkpoint.checkpoint_files import MANIFEST_FILE, STATE_FILE, Manifest, digest_of
from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.actor.weights.hf_files import SafetensorsReader, WeightsError, copy_companions
from megatron_dapo.actor.weights.hf_weights import hf_shapes, no_parameters
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.diagnostics.rank_pool import RankPlace, RankPool
from megatron_dapo.storage.durable import replace_folder
from tools.conversion.megatron_files import PartWriter, nothing, write_metadata
from tools.conversion.progress_line import Progress
from tools.conversion.row_runs import Run, row_elements, runs_of
from tools.conversion.stored import Chunk, Stored, extra_state_keys, share, stored_parameters
from tools.conversion.target import aside
from tools.conversion.workers import Counter, run_parts

COMPANIONS = "hf"
"""Folder in the checkpoint with the model's config and tokenizer, so that it converts back by itself."""

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
PLAIN_DTYPES = (*WEIGHT_DTYPES, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One worker's share."""

    source: Path
    file: Path
    parameters: list[Stored]
    extra: list[str]
    ranks: int
    dtype: torch.dtype


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
        parts = [
            Part(
                source=source,
                file=partial / f"__{worker}_0.distcp",
                parameters=share_of_worker,
                extra=extra if worker == 0 else [],
                ranks=tensor,
                dtype=dtype,
            )
            for worker, share_of_worker in enumerate(share(parameters, workers))
        ]
        written = run_parts(pool, "write", write_part, parts, progress, total)
        write_metadata(partial, parameters, extra, [results for results, _ in written], ranks=tensor, dtype=dtype)
        digests = {part.file.name: digest for part, (_, digest) in zip(parts, written, strict=True)}
        _write_small_files(partial, source, tensor, digests)
        replace_folder(partial, target)
    progress.close(f"{total / 1e6:.0f} MB written to {target}")
    return dtype


def write_part(place: RankPlace, part: Part, counter: Counter) -> tuple[list[WriteResult], str]:
    """One worker's file; one chunk is in memory at a time."""
    writer = PartWriter(part.file)
    for key in part.extra:
        writer.add(key, None, [None])
    with SafetensorsReader(part.source) as source:
        for stored in part.parameters:
            lead = () if stored.layer is None else (stored.layer,)
            for chunk in stored.chunks(part.ranks):
                shape, offset = (1,) * len(lead) + chunk.shape, lead + chunk.offset
                like = torch.empty(shape, dtype=part.dtype)
                pieces = _plain_pieces(stored, chunk, source, part)
                if pieces is None:
                    read = stored.read(chunk, source, part.ranks, part.dtype)
                    writer.add(stored.key, offset, read.view(shape))
                else:
                    writer.add_streamed(stored.key, offset, like, pieces)
                counter.add(place, like.nbytes)
    return writer.close()


def _plain_pieces(stored: Stored, chunk: Chunk, source: SafetensorsReader, part: Part) -> Iterator[memoryview] | None:
    """The chunk's bytes, which are those of the source; None where that has another type."""
    start, rows = chunk.offset[0], chunk.shape[0]
    runs = list(runs_of(stored.shards, start, start + rows))
    if any(source.dtype(run.name) != part.dtype for run in runs):
        return None
    columns = None if len(chunk.shape) == 1 else (chunk.offset[1], chunk.offset[1] + chunk.shape[1])
    return _pieces(
        source,
        runs,
        columns,
        padding=row_elements(chunk.shape) * part.dtype.itemsize * (rows - sum(run.rows for run in runs)),
    )


def _pieces(
    source: SafetensorsReader, runs: Sequence[Run], columns: tuple[int, int] | None, *, padding: int
) -> Iterator[memoryview]:
    """The rows of the runs, and zeros in as many bytes behind the vocabulary's."""
    for run in runs:
        yield from source.pieces(run.name, run.start, run.start + run.rows, columns)
    if padding:
        yield memoryview(bytes(padding))


def written_dtype(dtypes: dict[str, torch.dtype], source: Path, asked: torch.dtype | None) -> torch.dtype:
    """The type asked for, or else the one that all tensors have.

    Raises:
        WeightsError: they differ, or it is none that a model is trained in, or one holds no plain numbers (quantized
            weights mean nothing without their scales); with a tensor's name.
    """
    first = next(iter(dtypes.values()))
    for name, dtype in dtypes.items():
        if dtype not in PLAIN_DTYPES:
            raise WeightsError(f"{source}: tensor {name} has type {dtype}, as quantized weights have; give plain ones")
        if asked is not None:
            continue
        if dtype not in WEIGHT_DTYPES:
            raise WeightsError(f"{source}: tensor {name} has type {dtype}; give --dtype float32 or bfloat16")
        if dtype != first:
            raise WeightsError(
                f"{source}: tensor {name} has type {dtype}, others {first}; give --dtype to make them one"
            )
    return asked or first


def _write_small_files(partial: Path, source: Path, tensor: int, digests: dict[str, str]) -> None:
    """What the checkpoint has besides weights; the manifest last."""
    save_config(CheckpointingConfig("torch_dist", 1), str(partial))
    (partial / "common.pt").write_bytes(nothing().getbuffer())
    state = CheckpointState(
        optimizer_steps=0, layout=dataclasses.asdict(LayoutConfig(tensor=tensor)), distributed_optimizer=None
    )
    (partial / STATE_FILE).write_text(state.text())
    (partial / COMPANIONS).mkdir()
    copy_companions(source, partial / COMPANIONS)
    files = sorted(str(file.relative_to(partial)) for file in partial.rglob("*") if file.is_file())
    digests = {name: digests.get(name) or digest_of(partial / name) for name in files}
    (partial / MANIFEST_FILE).write_text(Manifest(files=digests).text())
