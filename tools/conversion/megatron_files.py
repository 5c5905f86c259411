"""The files of a Megatron distributed checkpoint, as PyTorch's distributed checkpointing defines them, read and written
chunk by chunk without a process group: any process reads any part, and each worker writes a file of its own."""

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, LoadPlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dapo.actor.checkpoint.checkpoint_files import (
    ALGORITHM,
    ALGORITHMS,
    MANIFEST_FILE,
    Manifest,
    read_manifest,
)
from megatron_dapo.actor.checkpoint.checkpoint_pickles import INDEX_FILE, read_index
from megatron_dapo.actor.step_data import CheckpointError
from megatron_dapo.actor.weights.hf_files import PIECE_BYTES, WeightsError
from tools.conversion.row_runs import row_elements
from tools.conversion.stored import Stored


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [row, row + rows) of a parameter, whole or their columns [column, column + columns), one row after the
    other in `file` from byte `offset` on."""

    file: Path
    offset: int
    row: int
    rows: int
    column: int
    columns: int
    """1 of a vector."""


class CheckpointReader:
    """The tensors of a checkpoint, one parameter at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._storage = FileSystemReader(self.folder)
        self.metadata: Metadata = read_index(self.folder)
        self._storage.set_up_storage_reader(self.metadata, is_coordinator=True)

    def dtype(self, stored: Stored) -> torch.dtype:
        return self._entry(stored).properties.dtype

    def check(self, stored: Stored) -> None:
        """Raise WeightsError unless the parameter is there, whole and of the shape that config.json tells."""
        entry = self._entry(stored)
        where, found = f"{self.folder / INDEX_FILE}: tensor {stored.key}", tuple(entry.size)
        expected = stored.global_shape(1)
        # Rows behind the vocabulary only pad it.
        padded = stored.layer is None and found[1:] == expected[1:] and found[0] >= expected[0] and stored.shards.split
        if found != expected and not padded:
            raise WeightsError(f"{where} has shape {list(found)}, the model of config.json needs {list(expected)}")
        held = sum(math.prod(item.lengths) for item in self._items(stored))
        if held != math.prod(self._shape(stored)):
            layer = "" if stored.layer is None else f", layer {stored.layer},"
            raise WeightsError(f"{where}{layer} is not whole: {held} of {math.prod(self._shape(stored))} numbers")

    def read(self, stored: Stored) -> Tensor:
        """The parameter as the checkpoint has it, padding included, on the CPU."""
        items, shape = self._items(stored), self._shape(stored)
        if len(items) == 1 and math.prod(items[0].lengths) == math.prod(shape) and not self._transformed(items[0]):
            return self._alone(items[0]).view(shape)
        planner = _Into(torch.empty(shape, dtype=self.dtype(stored)))
        self._storage.read_data(LoadPlan(items), planner).wait()
        return planner.target

    def _transformed(self, item: ReadItem) -> bool:
        return bool(self._places[item.storage_index].transform_descriptors)

    def _alone(self, item: ReadItem) -> Tensor:
        """What `read_data` would copy to its place: the copy is a tenth of a conversion's time."""
        with self._file(item).open("rb") as stream:
            part = self._storage._slice_file(stream, self._places[item.storage_index])
            return narrow_tensor_by_index(
                torch.load(part, map_location="cpu", weights_only=True), item.storage_offsets, item.lengths
            )

    def spans(self, stored: Stored) -> list[list[Span]] | None:
        """Where the parameter's bytes lie: of each range of rows, the spans side by side from left to right.

        None where a chunk is not stored plainly, or where the chunks are cut otherwise. The chunks' own headers are
        read, not their numbers.
        """
        shape, itemsize = self._shape(stored), self.dtype(stored).itemsize
        by_rows: dict[tuple[int, int], list[Span]] = {}
        for item in self._items(stored):
            lengths, begins, places = list(item.lengths), list(item.storage_offsets), list(item.dest_offsets)
            lead = len(lengths) - len(shape)
            if any(begins[lead:]) or self._transformed(item):
                return None
            data = self._data_offset(item)
            if data is None:
                return None
            rows, columns = lengths[lead], math.prod(lengths[lead + 1 :])
            offset = data + (begins[0] * rows * columns * itemsize if lead else 0)
            first = places[1] if len(shape) > 1 else 0
            span = Span(self._file(item), offset, places[0], rows, first, columns)
            by_rows.setdefault((span.row, span.rows), []).append(span)
        for side_by_side in by_rows.values():
            side_by_side.sort(key=lambda span: span.column)
            ends = [0, *accumulate(span.columns for span in side_by_side)]
            if [span.column for span in side_by_side] != ends[:-1] or ends[-1] != row_elements(shape):
                return None
        return list(by_rows.values())

    def _file(self, item: ReadItem) -> Path:
        return self.folder / self._places[item.storage_index].relative_path

    def _data_offset(self, item: ReadItem) -> int | None:
        """Where in its file the numbers of a chunk begin; None unless it is one contiguous tensor of its own."""
        place = self._places[item.storage_index]
        with self._file(item).open("rb") as stream:
            part = self._storage._slice_file(stream, place)
            reader = torch._C.PyTorchFileReader(part)
            data = [name for name in reader.get_all_records() if name.startswith("data/")]
            if len(data) != 1:
                return None
            begin = int(reader.get_record_offset(data[0]))  # type: ignore[attr-defined]  # PyTorch's stub lacks it
            part.seek(0)
            with torch.serialization.skip_data():
                tensor = torch.load(part, map_location="cpu", weights_only=True)
        entry = self.metadata.state_dict_metadata[item.storage_index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
        alike = tensor.is_contiguous() and tensor.dtype == entry.properties.dtype and tensor.shape == sizes
        return place.offset + begin + tensor.storage_offset() * tensor.itemsize if alike else None

    def tensors_in(self, file: str) -> list[str]:
        """What the file holds of: keys in their order there."""
        held = [(info.offset, index.fqn) for index, info in self._places.items() if info.relative_path == file]
        return list(dict.fromkeys(key for _, key in sorted(held)))

    @property
    def _places(self) -> Mapping[MetadataIndex, _StorageInfo]:
        return self.metadata.storage_data

    def _entry(self, stored: Stored) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata.get(stored.key)
        if not isinstance(entry, TensorStorageMetadata):
            raise WeightsError(
                f"{self.folder / INDEX_FILE}: tensor {stored.key} is missing; the model needs it with shape "
                f"{list(stored.global_shape(1))}"
            )
        return entry

    def _shape(self, stored: Stored) -> tuple[int, ...]:
        size = tuple(self._entry(stored).size)
        return size if stored.layer is None else size[1:]

    def _items(self, stored: Stored) -> list[ReadItem]:
        """Of each chunk that holds a part of the parameter, what part."""
        lead = 0 if stored.layer is None else 1
        items = []
        for chunk in self._entry(stored).chunks:
            begin = [0] * len(chunk.sizes)
            if stored.layer is not None:
                begin[0] = stored.layer - chunk.offsets[0]
                if not 0 <= begin[0] < chunk.sizes[0]:
                    continue
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(stored.key),
                    dest_offsets=torch.Size(chunk.offsets[lead:]),
                    storage_index=MetadataIndex(stored.key, chunk.offsets),
                    storage_offsets=torch.Size(begin),
                    lengths=torch.Size([1] * lead + list(chunk.sizes[lead:])),
                )
            )
        return items


class _Into(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the target that the item fills, with the layers' dimension where the item has it."""
        part = self.target
        lead = len(read_item.lengths) - part.dim()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths[lead:], strict=True)):
            part = part.narrow(dim, start, length)
        return part[None] if lead else part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: the item was read into its place."""


class PartWriter:
    """One worker's file: items one after the other, hashed as they are written."""

    def __init__(self, file: Path) -> None:
        self._name = file.name
        self._stream = file.open("wb")
        self._hash = ALGORITHMS[ALGORITHM]()
        self._pieces: Iterator[memoryview] = iter(())
        self._reason: Exception | None = None
        self.results: list[WriteResult] = []

    def add_streamed(self, key: str, offset: tuple[int, ...], like: Tensor, pieces: Iterator[memoryview]) -> None:
        """Write a tensor of the type and shape of `like`, whose bytes come in `pieces`: the same file as by `add`."""
        self._pieces = pieces
        with torch.serialization.skip_data():
            self.add(key, offset, like)

    def add(self, key: str, offset: tuple[int, ...] | None, content: Any) -> None:
        """Write a tensor, or with `offset` None an object."""
        begin = self._stream.tell()
        # The manifest has a checksum of the file; one inside it would triple the time.
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(content, cast(IO[bytes], self))
        except RuntimeError:
            # `torch.save` closes what it has begun and fails once more, over the reason.
            if self._reason is not None:
                raise self._reason from None
            raise
        finally:
            torch.serialization.set_crc32_options(before)
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
            with self._keeping_the_reason():
                self._stream.write(part)
        return len(whole)

    def seek(self, count: int, whence: int) -> int:
        """What `torch.save` calls where a tensor's bytes belong that it skips."""
        with self._keeping_the_reason():
            written = sum(self.write(piece) for piece in self._pieces)
            if (written, whence) != (count, os.SEEK_CUR):
                raise ValueError(f"{self._stream.name}: {written} bytes of a tensor that has {count} (whence {whence})")
        return self._stream.tell()

    @contextmanager
    def _keeping_the_reason(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._reason = self._reason or error
            raise

    def flush(self) -> None:
        self._stream.flush()

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
        lead = () if stored.layer is None else (stored.layer,)
        new = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(stored.global_shape(ranks)), [])
        for chunk in stored.chunks(ranks):
            sizes = torch.Size((1,) * len(lead) + chunk.shape)
            place = ChunkStorageMetadata(offsets=torch.Size(lead + chunk.offset), sizes=sizes)
            entries.setdefault(stored.key, new).chunks.append(place)
    entries |= {key: BytesStorageMetadata() for key in extra}
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(Metadata(state_dict_metadata=entries), list(results))


def whole_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there.

    Raises:
        CheckpointError: there is none, or a file of it is missing; the message names a tensor that was in it.
    """
    manifest = read_manifest(folder / MANIFEST_FILE)
    for name in (INDEX_FILE, *sorted(manifest.files)):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing{held_by(folder, name)}: the checkpoint is not whole")
    return manifest


def held_by(folder: Path, file: str) -> str:
    """In words, which tensors a file of shards holds; nothing for another file."""
    if not file.endswith(".distcp"):
        return ""
    try:
        keys = CheckpointReader(folder).tensors_in(file)
    except Exception:  # a damaged .metadata fails to unpickle in any way; the file's own name is then all there is
        return ""
    return f" (it holds parts of tensor {keys[0]} and {len(keys) - 1} more)" if keys else ""


def nothing() -> io.BytesIO:
    """A file of Megatron's for values that are not sharded, without any."""
    stream = io.BytesIO()
    torch.save({}, stream)
    return stream
