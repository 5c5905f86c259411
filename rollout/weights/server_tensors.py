"""The tensors of an SGLang server, rank by rank, made from a model's Hugging Face tensors.

SGLang fuses and shards what it loads: q, k and v become `qkv_proj`, gate and up become `gate_up_proj`, and each tensor-
parallel rank has its shard. Known models: Llama, Qwen2, Qwen3.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.wire.client import ServerInfo

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_VOCABULARY_STEP = 64
_CPU_INTERMEDIATE_STEP = 32
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_ROW_PARALLEL = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_DTYPES = {"float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Shard = Callable[[str, Tensor], list[Tensor]]
"""(Hugging Face name, whole tensor) -> a rank's shard of it, in pieces along the first dimension."""


@dataclass(frozen=True, slots=True)
class ServerTensor:
    """One tensor of one rank."""

    rank: int
    name: str
    """SGLang's."""
    sources: tuple[str, ...]
    """Hugging Face tensors that it is made of, in order."""
    shard: Shard

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensor in pieces, views of `tensors` wherever nothing is padded."""
        return [piece for source in self.sources for piece in self.shard(source, tensors[source])]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """What decides how a model's tensors are sharded."""

    layers: int
    key_heads: int
    vocabulary: int
    tied: bool
    intermediate: int
    """Width of the MLP, on a CPU padded so that each rank's is a multiple of 32."""
    ranks: int


def server_tensors(config: Mapping[str, Any], names: Container[str], info: ServerInfo) -> Iterator[ServerTensor]:
    """All tensors of a server like `info`.

    Args:
        config: the model's config.json.
        names: of its Hugging Face tensors; tells which optional ones it has.

    Raises:
        ValueError: an unknown model, or a size that the ranks do not divide.
    """
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"config.json: checksums of {architecture} are not known, only of {ARCHITECTURES}")
    layout = _layout_of(config, info)
    for rank in range(layout.ranks):
        yield from _of_rank(layout, names, rank)


def server_dtype(info: ServerInfo, config: Mapping[str, Any]) -> torch.dtype:
    """Type of a server's tensors. SGLang's rule: "auto" is the config's dtype, but then float32 becomes float16."""
    name = info.dtype
    if name == "auto":
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
        name = "float16" if name == "float32" else name
    if name not in _DTYPES:
        raise ValueError(f"the server's dtype {name!r} is not one of {sorted(_DTYPES)}")
    return _DTYPES[name]


def _layout_of(config: Mapping[str, Any], info: ServerInfo) -> _Layout:
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
    return _Layout(
        layers=config["num_hidden_layers"],
        key_heads=key_heads,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        intermediate=intermediate,
        ranks=ranks,
    )


def _of_rank(layout: _Layout, names: Container[str], rank: int) -> Iterator[ServerTensor]:
    def rows(name: str, tensor: Tensor) -> list[Tensor]:
        return _rows(tensor, name, layout, rank)

    def columns(name: str, tensor: Tensor) -> list[Tensor]:
        padded = layout.intermediate if ".mlp." in name else tensor.shape[1]
        return _shard(tensor, 1, padded, layout.ranks, rank, name)

    def vocabulary_rows(name: str, tensor: Tensor) -> list[Tensor]:
        return _vocabulary_rows(tensor, name, layout, rank)

    def whole(_: str, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    for layer in range(layout.layers):
        prefix = f"model.layers.{layer}."
        for fused, parts in _FUSED.items():
            for kind in ("weight", "bias"):
                sources = tuple(f"{prefix}{part}.{kind}" for part in parts)
                if kind == "weight" or sources[0] in names:
                    yield ServerTensor(rank, f"{prefix}{fused}.{kind}", sources, rows)
        for part in _ROW_PARALLEL:
            yield ServerTensor(rank, prefix + part, (prefix + part,), columns)
        # Head norms of Qwen3; biases after a row-parallel product are added once, but every rank holds them.
        optional = ("self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.o_proj.bias", "mlp.down_proj.bias")
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        for name in (*norms, *(name for name in optional if prefix + name in names)):
            yield ServerTensor(rank, prefix + name, (prefix + name,), whole)
    yield ServerTensor(rank, "model.norm.weight", ("model.norm.weight",), whole)
    # A tied head is the embedding itself, reported once; a copy in the file is not loaded.
    for name in ("model.embed_tokens.weight", *(() if layout.tied else ("lm_head.weight",))):
        yield ServerTensor(rank, name, (name,), vocabulary_rows)


def _rows(tensor: Tensor, name: str, layout: _Layout, rank: int) -> list[Tensor]:
    """A rank's output rows. If there are fewer key heads than ranks, several ranks have the same one."""
    if ".mlp." in name:
        return _shard(tensor, 0, layout.intermediate, layout.ranks, rank, name)
    ranks = layout.ranks
    if "k_proj" in name or "v_proj" in name:
        ranks = min(layout.ranks, layout.key_heads)
    return _shard(tensor, 0, tensor.shape[0], ranks, rank * ranks // layout.ranks, name)


def _vocabulary_rows(tensor: Tensor, name: str, layout: _Layout, rank: int) -> list[Tensor]:
    """The vocabulary is padded with rows of zeros to a multiple of 64 that the ranks divide."""
    step = _VOCABULARY_STEP
    if _multiple(layout.vocabulary, step) % layout.ranks:
        step *= layout.ranks
    return _shard(tensor[: layout.vocabulary], 0, _multiple(layout.vocabulary, step), layout.ranks, rank, name)


def _shard(tensor: Tensor, dim: int, padded: int, ranks: int, rank: int, name: str) -> list[Tensor]:
    """A rank's shard of `tensor`, as if it were padded with zeros to `padded` along `dim`."""
    if padded % ranks:
        raise ValueError(f"{name}: {padded} cannot be split over {ranks} ranks; see rollout.tensor_parallel")
    size, length = padded // ranks, tensor.shape[dim]
    part = tensor.narrow(dim, min(rank * size, length), max(0, min(size, length - rank * size)))
    missing = size - part.shape[dim]
    if missing == 0:
        return [part]
    zeros = part.new_zeros([missing if at == dim else length for at, length in enumerate(part.shape)])
    return [part, zeros] if dim == 0 else [torch.cat([part, zeros], dim)]


def _multiple(size: int, step: int) -> int:
    return -(-size // step) * step
