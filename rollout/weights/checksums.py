"""The checksum that every tensor of an SGLang server must have, computed while weights are sent, or from a folder.

Each tensor of the server (rollout.weights.server_tensors) is made here too and hashed with the server's own hash, so
equal checksums mean equal weights on every rank.
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
from rollout.weights.server_tensors import ServerTensor, server_dtype, server_tensors
from rollout.weights.tensor_hashes import cpu_hash, cuda_hash
from rollout.wire.client import ServerInfo

Checksums = dict[int, dict[str, str]]
"""{tensor-parallel rank: {SGLang's tensor name: hash}}"""

_HASH_THREADS = 4
_READ_AHEAD_BYTES = 1 << 30
"""Of a folder's tensors, in memory at a time."""


class ChecksumStream:
    """Checksums of a model whose Hugging Face tensors pass by once, in any order, for several kinds of servers.

    Example:
        with ChecksumStream(config, names, [info]) as stream:
            for tensors in buckets:
                stream.add(tensors)
                ...
                stream.flush()  # from here on the memory of `tensors` may be used again
            checksums = stream.finish()[info]
    """

    def __init__(self, config: Mapping[str, Any], names: Collection[str], kinds: Collection[ServerInfo]) -> None:
        """
        Args:
            config: the model's config.json.
            names: all Hugging Face tensors that will come.
            kinds: of servers.

        Raises:
            ValueError: an unknown model, a tensor that it needs and `names` lacks, or a size that the ranks of a server
                do not divide.
        """
        self._dtypes = {info: server_dtype(info, config) for info in kinds}
        self._expected = [(info, tensor) for info in self._dtypes for tensor in server_tensors(config, names, info)]
        self._by_source: dict[str, list[tuple[ServerInfo, ServerTensor]]] = defaultdict(list)
        for info, tensor in self._expected:
            for source in tensor.sources:
                if source not in names:
                    raise ValueError(f"the model needs {source}, which is not among its tensors")
                self._by_source[source].append((info, tensor))
        self._hashes: dict[tuple[ServerInfo, int, str], Future[str]] = {}
        """By kind of server, rank and the server's name of the tensor."""
        self._incomplete: dict[str, Tensor] = {}
        """Tensors that wait for another one that they are fused with."""
        self._pool = ThreadPoolExecutor(_HASH_THREADS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Begins to hash what `tensors` complete; they must not change until `flush`."""
        known = self._incomplete | dict(tensors)
        for name in tensors:
            for info, tensor in self._by_source[name]:
                key = (info, tensor.rank, tensor.name)
                if key not in self._hashes and all(source in known for source in tensor.sources):
                    parts = {source: known[source] for source in tensor.sources}
                    self._hashes[key] = self._pool.submit(self._hash, info, tensor, parts)
        self._incomplete = {
            name: value
            for name, value in known.items()
            if any((info, tensor.rank, tensor.name) not in self._hashes for info, tensor in self._by_source[name])
        }

    def flush(self) -> None:
        """Returns when every tensor that was given has been read."""
        wait(self._hashes.values())
        self._incomplete = {name: tensor.clone() for name, tensor in self._incomplete.items()}

    def finish(self) -> dict[ServerInfo, Checksums]:
        """Of each kind, once all tensors were given.

        Raises:
            ValueError: a tensor never came.
        """
        checksums: dict[ServerInfo, Checksums] = {info: defaultdict(dict) for info in self._dtypes}
        for info, tensor in self._expected:
            result = self._hashes.get((info, tensor.rank, tensor.name))
            if result is None:
                raise ValueError(f"{tensor.name} was never whole: one of its parts did not come")
            checksums[info][tensor.rank][tensor.name] = result.result()
        return {info: dict(by_rank) for info, by_rank in checksums.items()}

    def _hash(self, info: ServerInfo, tensor: ServerTensor, parts: Mapping[str, Tensor]) -> str:
        digest = cpu_hash if info.device == "cpu" else cuda_hash
        return digest([piece.to(self._dtypes[info]) for piece in tensor.pieces(parts)])


def expected_checksums(folder: Path, info: ServerInfo) -> Checksums:
    """Checksums of the safetensors in `folder` as a server like `info` holds them.

    Args:
        folder: Hugging Face layout: config.json and one or more .safetensors files.
        info: decides the hash (device), the dtype that tensors are cast to, and the ranks.

    Raises:
        ValueError: an unknown model, a tensor of it that is not in the files, or a size that the ranks do not divide.
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
                    stream.flush()
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
