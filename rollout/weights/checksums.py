"""The checksum that every tensor of an SGLang server must have, computed while weights are sent, or from a folder.

Each tensor of the server (rollout.weights.server_tensors) is made here too and hashed with the server's own hash, so
equal checksums mean equal weights on every rank. The hash is that of SGLang's weight checker: `cpu_hash` for servers on
a CPU, `cuda_sum` for servers on a GPU, each as 16 hex digits. It takes a tensor as parts that follow each other along
the first dimension, and neither joins nor copies them as a whole. That of GPU servers is sums of integers that wrap, so
that it is the same on every device: it is computed where the tensors are, and only 8 bytes of each come to the host, of
all that `flush` waits for in one copy.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import pad

from rollout.errors import WeightMismatch
from rollout.murmur import fmix32, rotate, signed
from rollout.weights.server_tensors import ServerTensor, server_dtype, server_tensors
from rollout.wire.client import ServerInfo

T = TypeVar("T")
Checksums = dict[int, dict[str, str]]
"""{tensor-parallel rank: {SGLang's tensor name: hash}}"""

_HASH_THREADS = 4
AHEAD_BYTES = 1 << 30
"""Of tensors that are hashed at a time: `add` waits beyond that."""

BLOCK_BYTES = 16 << 20
"""Bytes of a tensor that are processed at a time: few kernels on a GPU, nothing that counts beside a bucket."""

CPU_BLOCK_BYTES = 1 << 18
"""The same on a CPU: with its intermediates in the cache."""

_TILE_WORDS = 8192
_TILE_BYTES = 4 * _TILE_WORDS
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
_POSITION = ((0x27D4EB2D, 15), (0x165667B1, 13))
_LOW32 = (1 << 32) - 1
_LOW64 = (1 << 64) - 1


class ChecksumStream(AbstractContextManager["ChecksumStream"]):
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
        self.missing = set(names)
        """Those that have not come yet."""
        self._hashes: dict[tuple[ServerInfo, ServerTensor], Future[str | Tensor]] = {}
        self._incomplete: dict[str, Tensor] = {}
        """Tensors that wait for another one that they are fused with: at most what one fused tensor is made of, such as
        gate and up of all experts of a layer, beside what `add` is given."""
        self._copied: dict[str, Tensor] = {}
        """Those of them that have memory of their own."""
        self._pool, self._ahead = ThreadPoolExecutor(_HASH_THREADS), 0

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def limit(self, names: Collection[str]) -> None:
        """Before the first of them: these alone will come, with all that one of them is fused with."""
        self.missing = set(names)
        self._expected = [each for each in self._expected if self.missing.issuperset(each[1].sources)]

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Begins to hash what `tensors` complete; they must not change until `flush`, and stay in memory as long."""
        self.missing -= tensors.keys()
        known = self._incomplete | dict(tensors)
        for name in tensors:
            for key in self._by_source[name]:
                if key not in self._hashes and known.keys() >= set(key[1].sources):
                    # A GPU is only given work, in order with what fills the tensors and uses them again.
                    at_once = tensors[name].is_cuda and key[0].device != "cpu"
                    hashed = ready(self._hash(*key, known)) if at_once else self._pool.submit(self._hash, *key, known)
                    self._hashes[key] = hashed
        still = {name for name in known if any(key not in self._hashes for key in self._by_source[name])}
        self._incomplete = {name: known[name] for name in still}
        self._ahead += sum(tensor.nbytes for tensor in tensors.values())
        if self._ahead > AHEAD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Returns when every tensor that was given has been read."""
        wait(self._hashes.values())
        copied, self._ahead = self._copied, 0
        self._copied = {name: copied[name] if name in copied else one.clone() for name, one in self._incomplete.items()}
        self._incomplete = dict(self._copied)
        # The one wait for a GPU: what is read above comes before it on the same stream.
        sums = {key: value for key, each in self._hashes.items() if isinstance(value := each.result(), Tensor)}
        for key, total in zip(sums, torch.stack(list(sums.values())).tolist() if sums else (), strict=True):
            self._hashes[key] = ready(_text(total))
        if any(each.is_cuda for each in self._copied.values()):
            torch.cuda.current_stream().synchronize()

    def finish(self) -> dict[ServerInfo, Checksums]:
        """Of each kind, once all tensors were given.

        Raises:
            ValueError: a tensor never came.
        """
        self.flush()
        checksums: dict[ServerInfo, Checksums] = {info: defaultdict(dict) for info in self._dtypes}
        for info, tensor in self._expected:
            if (info, tensor) not in self._hashes:
                raise ValueError(f"{tensor.name} was never whole: one of its parts did not come")
            checksums[info][tensor.rank][tensor.name] = str(self._hashes[info, tensor].result())
        return {info: dict(by_rank) for info, by_rank in checksums.items()}

    def _hash(self, info: ServerInfo, tensor: ServerTensor, parts: Mapping[str, Tensor]) -> str | Tensor:
        digest = cpu_hash if info.device == "cpu" else cuda_sum
        return digest([piece.to(self._dtypes[info]) for piece in tensor.pieces(parts)])


def expected_checksums(folder: Path, info: ServerInfo) -> Checksums:
    """Checksums of the safetensors in `folder` as a server like `info` holds them.

    Args:
        folder: Hugging Face layout: config.json and one or more .safetensors files.
        info: decides the hash (device), the dtype that tensors are cast to, and the ranks.

    Raises:
        ValueError: an unknown model, a tensor of it that is not in the files, or a size that the ranks do not divide.
        FileNotFoundError: no config in `folder`.
    """
    config = json.loads((folder / "config.json").read_text())
    files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    where = {name: file for file in files for name in list(file.keys())}
    try:
        with ChecksumStream(config, where.keys(), [info]) as stream:
            for name, file in where.items():
                stream.add({name: file.get_tensor(name)})
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
            held, published = theirs.get(name, "no checksum"), ours.get(name, "nothing")
            if held != published:
                problems.append(f"{name}{place} has {held}, published {published}")
    if problems:
        raise WeightMismatch(where, problems)


DRAFT = "draft."
"""Before SGLang's names of a draft model's tensors."""


def without_draft(reported: Checksums) -> Checksums:
    """Without those of a draft model."""
    return {rank: {n: sum_ for n, sum_ in sums.items() if not n.startswith(DRAFT)} for rank, sums in reported.items()}


def verify_draft(before: Checksums | None, reported: Checksums, where: str) -> Checksums:
    """Checksums of the draft model's own tensors. The others are the published model's: embedding and output layer.

    Args:
        before: since the start of the server; None: not known.

    Raises:
        WeightMismatch: a publish changed the draft model.
    """
    draft: Checksums = {}
    for rank, names in reported.items():
        drafted = ((name, value) for name, value in names.items() if name.startswith(DRAFT))
        draft[rank] = {name: value for name, value in drafted if value != names.get(name.removeprefix(DRAFT))}
    if before is not None:
        verify(before, draft, f"{where}: its draft model")
    return draft


def cpu_hash(parts: Sequence[Tensor]) -> str:
    """First 8 bytes of the SHA-256 of the bytes."""
    digest = hashlib.sha256()
    for block in _blocks(parts):
        digest.update(block.cpu().numpy().data)
    return digest.digest()[:8].hex()


def cuda_sum(parts: Sequence[Tensor]) -> Tensor:
    """What SGLang's `gpu_tensor_hash` mixes last: int64 [], on the device of `parts`, which nothing here waits for.

    A sum over the 32-bit words, each mixed with its position, tile by tile of 8192. Every word v at index i gives
    fmix32(v ^ (i * A + seed ^ rotate(i))) for two sets of constants; a tile's two sums are mixed again and joined to 64
    bits, and the tiles' values are added. The words are int32 here, whose products and sums wrap as the kernel's
    unsigned ones do. A tile's first index and the place in it have no bit in common, so `rotate` and the product are
    those of each, combined: what is computed for every word are the sum of two, three times "or else", and fmix32.
    """
    size, device = sum(part.numel() * part.element_size() for part in parts), parts[0].device
    size += -size % 4
    total, begin = torch.zeros((), dtype=torch.int64, device=device), 0
    factors, turns = _positions(torch.arange(_TILE_WORDS, dtype=torch.int32, device=device), with_seed=True)
    for run in _whole_tiles(parts):
        words = -(-run.numel() // 4)
        if missing := -run.numel() % _TILE_BYTES:
            run = pad(run, (0, missing))
        tiles = run.view(torch.int32).view(-1, _TILE_WORDS)
        first = torch.arange(begin, begin + tiles.numel(), _TILE_WORDS, device=device).to(torch.int32)
        first_factors, first_turns = (each[:, :, None] for each in _positions(first, with_seed=False))
        mixed = (first_factors + factors[:, None]).bitwise_xor_(turns[:, None]).bitwise_xor_(first_turns)
        mixed = fmix32(mixed.bitwise_xor_(tiles))
        mixed.view(2, -1)[:, words:] = 0
        high, low = fmix32(mixed.sum(2, dtype=torch.int32) ^ signed(size & _LOW32)).to(torch.int64)
        total += ((high << 32) | (low & _LOW32)).sum()
        begin += words
    return total


def _positions(index: Tensor, *, with_seed: bool) -> tuple[Tensor, Tensor]:
    """Of int32 [n]: i * A (+ seed), and rotate(i), each for both sets of constants, [2, n]."""
    seeds = _SEEDS if with_seed else (0, 0)
    products = [index * signed(factor) + signed(seed) for seed, (factor, _) in zip(seeds, _POSITION, strict=True)]
    return torch.stack(products), torch.stack([rotate(index, bits) for _, bits in _POSITION])


def _text(total: int) -> str:
    return f"{_splitmix64(total & _LOW64):016x}"


def ready(value: T) -> Future[T]:
    """A future that has its result."""
    future = Future[T]()
    future.set_result(value)
    return future


def _blocks(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bytes of the parts, uint8, some rows at a time; nothing is copied of rows that stand in order."""
    for part in parts:
        rows = part.detach().reshape(-1, 1) if part.dim() < 2 else part.detach()
        if rows.numel() == 0:
            continue
        bytes_a_row = rows.element_size() * rows[0].numel()
        for block in rows.split(max(1, _block_bytes(part) // bytes_a_row)):
            yield block.contiguous().reshape(-1).view(torch.uint8)


def _block_bytes(part: Tensor) -> int:
    return BLOCK_BYTES if part.is_cuda else CPU_BLOCK_BYTES


def _whole_tiles(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same bytes in runs of whole tiles; the last run is what is left."""
    rest: list[Tensor] = []
    for block in _blocks(parts):
        rest.append(block)
        if sum(each.numel() for each in rest) < _block_bytes(block):
            continue
        joined = torch.cat(rest) if len(rest) > 1 else block
        whole = joined.numel() // _TILE_BYTES * _TILE_BYTES
        yield joined[:whole]
        rest = [joined[whole:]] if whole < joined.numel() else []
    if rest:
        yield torch.cat(rest)


def _splitmix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LOW64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LOW64
    return value ^ (value >> 31)
