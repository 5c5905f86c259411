"""The checksum every tensor of an SGLang server must have after it loaded a folder of Hugging Face safetensors.

SGLang joins and cuts what it loads: q, k and v become `qkv_proj`, gate and up become `gate_up_proj`, and a tensor-
parallel rank holds its share of each. The same is done here to the published file, tensor by tensor, and hashed with
the same hash, so that equal checksums mean equal weights on every rank. Known models: Llama, Qwen2, Qwen3.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rollout.client import ServerInfo
from rollout.errors import WeightMismatch
from rollout.hashes import hash_for

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

Checksums = dict[int, dict[str, str]]
"""{tensor-parallel rank: {SGLang's tensor name: hash}}"""

_VOCABULARY_STEP = 64
_CPU_INTERMEDIATE_STEP = 32
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_ROW_PARALLEL = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_DTYPES = {"float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HASH_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """What of a model's config decides how its tensors are cut."""

    layers: int
    key_heads: int
    vocabulary: int
    tied: bool
    intermediate: int
    """Width of the MLP, on a CPU filled up so that each rank's is a multiple of 32."""
    ranks: int


def _shape_of(config: Mapping[str, Any], info: ServerInfo) -> _Shape:
    heads, ranks = config["num_attention_heads"], info.tensor_parallel
    key_heads = config.get("num_key_value_heads") or heads
    intermediate = config["intermediate_size"]
    if info.device == "cpu":
        if heads % ranks or key_heads % ranks:
            raise ValueError(
                f"rollout.tensor_parallel = {ranks}: must divide the model's {heads} heads and {key_heads} key heads "
                "on a CPU; SGLang would invent heads of zeros there"
            )
        intermediate = _multiple(intermediate, _CPU_INTERMEDIATE_STEP * ranks)
    return _Shape(
        layers=config["num_hidden_layers"],
        key_heads=key_heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        intermediate=intermediate,
        ranks=ranks,
    )


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
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{folder}/config.json: checksums of {architecture} are not known, only of {ARCHITECTURES}")
    shape = _shape_of(config, info)
    hashed, dtype = hash_for(info.device), _dtype(info.dtype, config)
    files = _Files(folder)

    def checksum(entry: tuple[int, str, Callable[[], Tensor]]) -> tuple[int, str, str]:
        rank, name, build = entry
        return rank, name, hashed(build().to(dtype))

    checksums: Checksums = {rank: {} for rank in range(shape.ranks)}
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        for rank, name, value in pool.map(checksum, _tensors(files, shape)):
            checksums[rank][name] = value
    return checksums


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


class _Files:
    """Tensors of a folder by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where: dict[str, Any] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{folder}: no .safetensors file; publish a folder in Hugging Face layout")
        for path in paths:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - not a mapping
                self.where[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.where:
            raise ValueError(f"{self.folder}: the model needs {name}, which is in none of its .safetensors files")
        return self.where[name].get_tensor(name)


def _dtype(name: str, config: Mapping[str, Any]) -> torch.dtype:
    """SGLang's rule: "auto" is the config's dtype, but float32 becomes float16 then."""
    if name == "auto":
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
        name = "float16" if name == "float32" else name
    if name not in _DTYPES:
        raise ValueError(f"the server's dtype {name!r} is not one of {sorted(_DTYPES)}")
    return _DTYPES[name]


def _tensors(files: _Files, shape: _Shape) -> Iterator[tuple[int, str, Callable[[], Tensor]]]:
    """(rank, SGLang's name, how to build it) of all tensors."""
    whole = ["model.norm.weight"]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for fused, parts in _FUSED.items():
            for kind in ("weight", "bias"):
                sources = [f"{prefix}{part}.{kind}" for part in parts]
                if kind == "weight" or sources[0] in files:
                    for rank in range(shape.ranks):
                        yield rank, f"{prefix}{fused}.{kind}", _fuse(files, sources, shape, rank)
        for part in _ROW_PARALLEL:
            for rank in range(shape.ranks):
                yield rank, prefix + part, _columns(files, prefix + part, shape, rank)
        whole += [f"{prefix}{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
        # Head norms of Qwen3; biases after a row-parallel product are added once, but every rank holds them.
        optional = ("self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.o_proj.bias", "mlp.down_proj.bias")
        whole += [prefix + name for name in optional if prefix + name in files]
    for name in whole:
        for rank in range(shape.ranks):
            yield rank, name, partial(files.__getitem__, name)
    # A tied head is the embedding itself, reported once; a copy in the file is not loaded.
    for name in ("model.embed_tokens.weight", *(() if shape.tied else ("lm_head.weight",))):
        for rank in range(shape.ranks):
            yield rank, name, _vocabulary_rows(files, name, shape, rank)


def _fuse(files: _Files, sources: list[str], shape: _Shape, rank: int) -> Callable[[], Tensor]:
    def build() -> Tensor:
        return torch.cat([_rows(files[name], name, shape, rank) for name in sources])

    return build


def _rows(tensor: Tensor, name: str, shape: _Shape, rank: int) -> Tensor:
    """A rank's output rows. Key heads that are fewer than the ranks are held by several of them."""
    if ".mlp." in name:
        return _share(tensor, 0, shape.intermediate, shape.ranks, rank, name)
    ranks = shape.ranks
    if "k_proj" in name or "v_proj" in name:
        ranks = min(shape.ranks, shape.key_heads)
    return _share(tensor, 0, tensor.shape[0], ranks, rank * ranks // shape.ranks, name)


def _columns(files: _Files, name: str, shape: _Shape, rank: int) -> Callable[[], Tensor]:
    def build() -> Tensor:
        tensor = files[name]
        padded = shape.intermediate if ".mlp." in name else tensor.shape[1]
        return _share(tensor, 1, padded, shape.ranks, rank, name)

    return build


def _vocabulary_rows(files: _Files, name: str, shape: _Shape, rank: int) -> Callable[[], Tensor]:
    """The vocabulary is padded with rows of zeros to a multiple of 64 that the ranks divide."""

    def build() -> Tensor:
        step = _VOCABULARY_STEP
        if _multiple(shape.vocabulary, step) % shape.ranks:
            step *= shape.ranks
        tensor = files[name][: shape.vocabulary]
        return _share(tensor, 0, _multiple(shape.vocabulary, step), shape.ranks, rank, name)

    return build


def _share(tensor: Tensor, dim: int, padded: int, ranks: int, rank: int, name: str) -> Tensor:
    """A rank's part of `tensor`, which counts as filled up with zeros to `padded` along `dim`."""
    if padded % ranks:
        raise ValueError(f"{name}: {padded} cannot be split over {ranks} ranks; see rollout.tensor_parallel")
    size = padded // ranks
    part = tensor.narrow(dim, min(rank * size, tensor.shape[dim]), max(0, min(size, tensor.shape[dim] - rank * size)))
    zeros = part.new_zeros([size - part.shape[dim] if at == dim else length for at, length in enumerate(part.shape)])
    return torch.cat([part, zeros], dim)


def _multiple(size: int, step: int) -> int:
    return -(-size // step) * step
