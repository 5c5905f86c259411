"""The files of a Megatron distributed checkpoint, as PyTorch's distributed checkpointing defines them, read and written
chunk by chunk without a process group: any process reads any part, and each worker writes a file of its own."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dapo.actor.checkpoint.checkpoint_pickles import INDEX_FILE, read_index
from megatron_dapo.actor.weights.hf_files import PIECE_BYTES, WeightsError
from tools.conversion.stored import Stored


class CheckpointReader:
    """The tensors of a checkpoint, one parameter at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._storage = FileSystemReader(self.folder)
        self.metadata: Metadata = read_index(self.folder)
        self._held: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        """Of a tensor the chunks by layer and expert."""
        self._storage.set_up_storage_reader(self.metadata, is_coordinator=True)

    def dtype(self, stored: Stored) -> torch.dtype:
        return self._entry(stored).properties.dtype

    def check(self, stored: Stored) -> None:
        """Raise WeightsError unless the parameter is there, whole and of the shape that config.json tells."""
        entry = self._entry(stored)
        where, found = f"{self.folder / INDEX_FILE}: tensor {stored.key}", tuple(entry.size)
        expected = stored.global_shape(1)
        # Rows behind the vocabulary only pad it.
        padded = not stored.at and found[1:] == expected[1:] and found[0] >= expected[0] and stored.shards.split
        if found != expected and not padded:
            raise WeightsError(f"{where} has shape {list(found)}, the model of config.json needs {list(expected)}")
        lead, wanted = stored.lead, math.prod(self._shape(stored))
        held = sum(math.prod(chunk.sizes[lead:]) for chunk in self._chunks(stored))
        if held != wanted:
            names = (f", {kind} {at}" for kind, at in zip(("layer", "expert"), stored.at, strict=False))
            layer = "".join((*names, ",")) if lead else ""
            raise WeightsError(f"{where}{layer} is not whole: {held} of {wanted} numbers")

    def read(self, stored: Stored) -> Tensor:
        """The parameter as the checkpoint has it, padding included, on the CPU."""
        whole = torch.empty(self._shape(stored), dtype=self.dtype(stored))
        for chunk in self._chunks(stored):
            place = self.metadata.storage_data[MetadataIndex(stored.key, chunk.offsets)]
            with (self.folder / place.relative_path).open("rb") as stream:
                slice_of_file = self._storage._slice_file(stream, place)
                part = torch.load(slice_of_file, map_location="cpu", weights_only=True)
            part = part[tuple(at - offset for at, offset in zip(stored.at, chunk.offsets, strict=False))]
            if part.shape == whole.shape:
                return part
            ends = zip(chunk.offsets[stored.lead :], part.shape, strict=True)
            whole[tuple(slice(start, start + length) for start, length in ends)] = part
        return whole

    def _entry(self, stored: Stored) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata.get(stored.key)
        if not isinstance(entry, TensorStorageMetadata):
            raise WeightsError(
                f"{self.folder / INDEX_FILE}: tensor {stored.key} is missing; the model needs it with shape "
                f"{list(stored.global_shape(1))}"
            )
        return entry

    def _shape(self, stored: Stored) -> tuple[int, ...]:
        return tuple(self._entry(stored).size[stored.lead :])

    def _chunks(self, stored: Stored) -> list[ChunkStorageMetadata]:
        """Those that hold a part of the parameter."""
        if stored.key not in self._held:
            held = self._held[stored.key] = defaultdict(list)
            for chunk in self._entry(stored).chunks:
                ends = zip(chunk.offsets[: stored.lead], chunk.sizes, strict=False)
                for at in itertools.product(*(range(begin, begin + size) for begin, size in ends)):
                    held[at].append(chunk)
        return self._held[stored.key][stored.at]


class PartWriter:
    """One worker's file: items one after the other, hashed as they are written."""

    def __init__(self, file: Path) -> None:
        self._name = file.name
        self._stream = file.open("wb", buffering=0)
        self._hash = xxhash.xxh3_128()
        self.results: list[WriteResult] = []
        # The manifest has a checksum of the file; one of each item would triple the time.
        torch.serialization.set_crc32_options(False)

    def add(self, key: str, offset: tuple[int, ...] | None, content: Any) -> None:
        """Write a tensor, or with `offset` None an object."""
        begin = self._stream.tell()
        try:
            torch.save(content, cast(IO[bytes], self))
        except RuntimeError as error:
            # `torch.save` closes what it has begun and fails once more, over the reason.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        place = _StorageInfo(self._name, begin, self._stream.tell() - begin)
        index = MetadataIndex(key) if offset is None else MetadataIndex(key, offset)
        self.results.append(WriteResult(index=index, size_in_bytes=place.length, storage_data=place))

    def write(self, piece: Any) -> int:
        """What `torch.save` calls."""
        whole = memoryview(piece)
        # Small enough that the second use finds it in the processor's cache; large writes are slower by themselves.
        for start in range(0, len(whole), PIECE_BYTES):
            part = whole[start : start + PIECE_BYTES]
            self._hash.update(part)
            while part:
                part = part[self._stream.write(part) :]
        return len(whole)

    def flush(self) -> None:
        """What `torch.save` calls too."""

    def close(self) -> tuple[list[WriteResult], str]:
        """Where everything stands, and the file's checksum for the manifest."""
        self._stream.close()
        return self.results, self._hash.hexdigest()


def write_metadata(
    folder: Path,
    parameters: Sequence[Stored],
    extra: Sequence[str],
    results: Sequence[list[WriteResult]],
    *,
    ranks: int,
    dtype: torch.dtype,
) -> None:
    """`.metadata`: what the checkpoint holds, and where `results` say that it stands."""
    entries: dict[str, Any] = {}
    for stored in parameters:
        new = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(stored.global_shape(ranks)), [])
        for chunk in stored.chunks(ranks):
            sizes = torch.Size((1,) * stored.lead + chunk.shape)
            place = ChunkStorageMetadata(offsets=torch.Size(stored.at + chunk.offset), sizes=sizes)
            entries.setdefault(stored.key, new).chunks.append(place)
    entries |= {key: BytesStorageMetadata() for key in extra}
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(Metadata(state_dict_metadata=entries), list(results))
