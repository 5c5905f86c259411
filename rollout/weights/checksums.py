"""The checksum every tensor of an SGLang server must have: computed while weights are sent, or from a folder of them.

What a server holds (rollout.weights.server_tensors) is made here too, tensor by tensor, and hashed with the server's
own hash, so that equal checksums mean equal weights on every rank.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open
from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.weights.server_tensors import Held, held_dtype, held_tensors
from rollout.weights.tensor_hashes import hash_for
from rollout.wire.client import ServerInfo

Checksums = dict[int, dict[str, str]]
"""{tensor-parallel rank: {SGLang's tensor name: hash}}"""

_HASH_THREADS = 4
_READ_AHEAD_BYTES = 1 << 30
"""Of a folder's tensors that are in memory at a time."""


class ChecksumStream:
    """Checksums of a model whose Hugging Face tensors pass by once, in any order, for several kinds of servers.

    Example:
        with ChecksumStream(config, names, [info]) as stream:
            for tensors in buckets:
                stream.add(tensors)
                ...
                stream.settle()  # from here on the memory of `tensors` may be used again
            checksums = stream.finish()[info]
    """

    def __init__(self, config: Mapping[str, Any], names: Collection[str], kinds: Collection[ServerInfo]) -> None:
        """
        Args:
            config: the model's config.json.
            names: all Hugging Face tensors that will come.
            kinds: of servers.

        Raises:
            ValueError: a model that is not known, a tensor that it needs and `names` lacks, or a size that the ranks of
                a server do not divide.
        """
        self._kinds = tuple(dict.fromkeys(kinds))
        self._dtypes = {info: held_dtype(info, config) for info in self._kinds}
        self._entries: dict[str, list[tuple[ServerInfo, Held]]] = defaultdict(list)
        """By each of an entry's sources."""
        self._results: dict[ServerInfo, dict[tuple[int, str], Future[str]]] = {info: {} for info in self._kinds}
        self._held_back: dict[str, Tensor] = {}
        """Tensors that wait for another one they are joined with."""
        self._missing = {
            (info, held.rank, held.name) for info in self._kinds for held in held_tensors(config, names, info)
        }
        for info in self._kinds:
            for held in held_tensors(config, names, info):
                lacking = [source for source in held.sources if source not in names]
                if lacking:
                    raise ValueError(f"the model needs {lacking[0]}, which is not among its tensors")
                for source in held.sources:
                    self._entries[source].append((info, held))
        self._pool = ThreadPoolExecutor(_HASH_THREADS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Begins to hash what is whole with `tensors`; they must not change until `settle`."""
        known = self._held_back | dict(tensors)
        for name in tensors:
            for info, held in self._entries[name]:
                key = (held.rank, held.name)
                if key not in self._results[info] and all(source in known for source in held.sources):
                    parts = {source: known[source] for source in held.sources}
                    self._results[info][key] = self._pool.submit(self._hash, info, held, parts)
        self._held_back = {
            name: tensor
            for name, tensor in known.items()
            if any((held.rank, held.name) not in self._results[info] for info, held in self._entries[name])
        }

    def settle(self) -> None:
        """Returns when every tensor that was given has been read."""
        wait([result for results in self._results.values() for result in results.values()])
        self._held_back = {name: tensor.clone() for name, tensor in self._held_back.items()}

    def finish(self) -> dict[ServerInfo, Checksums]:
        """Of each kind, once all tensors were given.

        Raises:
            ValueError: a tensor never came.
        """
        checksums: dict[ServerInfo, Checksums] = {info: defaultdict(dict) for info in self._kinds}
        for info, rank, name in sorted(self._missing, key=lambda entry: entry[1:]):
            result = self._results[info].get((rank, name))
            if result is None:
                raise ValueError(f"{name} was never whole: one of its parts did not come")
            checksums[info][rank][name] = result.result()
        return {info: dict(of_kind) for info, of_kind in checksums.items()}

    def _hash(self, info: ServerInfo, held: Held, parts: Mapping[str, Tensor]) -> str:
        dtype = self._dtypes[info]
        return hash_for(info.device)([piece.to(dtype) for piece in held.pieces(parts)])


def expected_checksums(folder: Path, info: ServerInfo) -> Checksums:
    """Checksums of the safetensors in `folder` as a server like `info` holds them.

    Args:
        folder: Hugging Face layout: config.json and one or more .safetensors files.
        info: decides the hash (device), the dtype that tensors are cast to, and the ranks.

    Raises:
        ValueError: a model whose tensors are not known here, a tensor of it that is not in the files, or a size that
            the ranks do not divide.
        FileNotFoundError: no config or no safetensors in `folder`.
    """
    config = json.loads((folder / "config.json").read_text())
    where = _files(folder)
    try:
        with ChecksumStream(config, where.keys(), [info]) as stream:
            read = 0
            for name, file in where.items():
                tensor = file.get_tensor(name)
                stream.add({name: tensor})
                read += tensor.nbytes
                if read > _READ_AHEAD_BYTES:
                    stream.settle()
                    read = 0
            return stream.finish()[info]
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def verify(expected: Checksums, reported: Mapping[int, Mapping[str, str]], where: str = "server") -> None:
    """Returns if every tensor of every rank has its checksum.

    Raises:
        WeightMismatch: names the tensors that differ, are missing, or are not expected.
    """
    problems = []
    for rank in sorted(expected.keys() | reported.keys()):
        ours, theirs = expected.get(rank, {}), reported.get(rank, {})
        place = f" (rank {rank})" if len(expected) > 1 else ""
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) == theirs.get(name):
                continue
            if name not in theirs:
                problems.append(f"{name}{place} is not reported")
            elif name not in ours:
                problems.append(f"{name}{place} is not in the published files")
            else:
                problems.append(f"{name}{place} has {theirs[name]}, published {ours[name]}")
    if problems:
        raise WeightMismatch(where, problems)


def _files(folder: Path) -> dict[str, Any]:
    """The open file of each tensor of a folder."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no .safetensors file; publish a folder in Hugging Face layout")
    where: dict[str, Any] = {}
    for path in paths:
        file = safe_open(path, framework="pt")
        where |= dict.fromkeys(file.keys(), file)
    return where
