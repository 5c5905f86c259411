"""The tensors of an SGLang server, rank by rank, made from a model's Hugging Face tensors.

SGLang fuses and shards what it loads: q, k and v become `qkv_proj`, gate and up become `gate_up_proj`, and each tensor-
parallel rank has its shard. Of a layer's experts it makes two tensors: `w13_weight`, gate and up of each expert in
turn, and `w2_weight`. Known models: Llama, Qwen2, Qwen3, Qwen3-MoE.

FP8 weights have a second tensor, of a scale for each block. SGLang's weight checker does not hash the two: it hashes
their product, in bfloat16. So that is what is made here.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.wire.client import ServerInfo

MIXTURE = "Qwen3MoeForCausalLM"
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", MIXTURE)

_VOCABULARY_STEP = 64
"""The vocabulary is padded to a multiple of this that the ranks divide."""
_CPU_INTERMEDIATE_STEP = 32
"""On a CPU the MLP is padded so that the width of each rank is a multiple of this."""
_VOCABULARY, _BY_COLUMNS = ("embed_tokens", "lm_head"), ("o_proj", "down_proj")
_FUSED = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
_FUSED_MLP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_EACH = ("self_attn.o_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight")
_OPTIONAL = ("self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.o_proj.bias", "mlp.down_proj.bias")
"""Head norms of Qwen3; biases after a row-parallel product are added once, but every rank holds them."""
SCALE = "_scale_inv"
"""Behind the name of an FP8 weight: its scales."""
_DTYPES = {"float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class ServerTensor:
    """One tensor of one rank."""

    rank: int
    name: str
    """SGLang's."""
    sources: tuple[str, ...]
    """Hugging Face tensors that it is made of, in order, then the scales of those that have any."""
    layout: "_Layout"

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensor in pieces, views of `tensors` wherever nothing is padded or quantized."""
        weights = [source for source in self.sources if not source.endswith(SCALE)]
        return [piece for name in weights for piece in self.layout.shard(name, _unquantized(name, tensors), self.rank)]


class _Layout:
    """What decides how a model's tensors are sharded."""

    def __init__(self, config: Mapping[str, Any], info: ServerInfo) -> None:
        heads, ranks = config["num_attention_heads"], info.tensor_parallel
        self.ranks, self.key_heads = ranks, config.get("num_key_value_heads") or heads
        # Where it is of an expert, no layer has an MLP besides.
        intermediate = config["moe_intermediate_size" if MIXTURE in config["architectures"] else "intermediate_size"]
        if info.device == "cpu":
            if heads % ranks or self.key_heads % ranks:
                rule = f"must divide the model's {heads} heads and {self.key_heads} key heads on a CPU"
                raise ValueError(f"rollout.tensor_parallel = {ranks}: {rule}; SGLang would invent heads of zeros there")
            intermediate = _multiple(intermediate, _CPU_INTERMEDIATE_STEP * ranks)
        self.vocabulary, step = config["vocab_size"], _VOCABULARY_STEP
        if _multiple(self.vocabulary, step) % ranks:
            step *= ranks
        self.sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"))
        """Of the tensors that are sharded, by the last part of their name: the size to which they are padded with
        zeros."""
        self.sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), intermediate)
        self.sizes |= dict.fromkeys(_VOCABULARY, _multiple(self.vocabulary, step))

    def shard(self, name: str, tensor: Tensor, rank: int) -> list[Tensor]:
        """A rank's shard of a Hugging Face tensor, in pieces along the first dimension.

        Raises:
            ValueError: a size that the ranks do not divide.
        """
        part, kind = name.split(".")[-2:]
        dim = int(part in _BY_COLUMNS)
        if part not in self.sizes or (dim == 1 and kind == "bias"):
            return [tensor]
        if part in _VOCABULARY:
            tensor = tensor[: self.vocabulary]
        length = tensor.shape[dim]
        size = self.sizes[part] or length
        # If there are fewer key heads than ranks, several ranks have the same one.
        ranks = min(self.ranks, self.key_heads) if part in ("k_proj", "v_proj") else self.ranks
        if size % ranks:
            raise ValueError(f"{name}: {size} cannot be split over {ranks} ranks; see rollout.tensor_parallel")
        size //= ranks
        begin = min(rank * ranks // self.ranks * size, length)
        shard = tensor.narrow(dim, begin, min(size, length - begin))
        missing = size - shard.shape[dim]
        if missing == 0:
            return [shard]
        zeros = shard.new_zeros([missing if at == dim else width for at, width in enumerate(shard.shape)])
        return [shard, zeros] if dim == 0 else [torch.cat([shard, zeros], dim)]


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
    layout, whole = _Layout(config, info), ["model.norm.weight", "model.embed_tokens.weight"]
    if not config.get("tie_word_embeddings"):  # a tied head is the embedding itself; a copy in the file is not loaded
        whole.append("lm_head.weight")
    mixture = architecture == MIXTURE
    fused_of_layer = _FUSED if mixture else _FUSED | _FUSED_MLP
    each_of_layer = (*_EACH, "mlp.gate.weight" if mixture else "mlp.down_proj.weight")

    def made_of(rank: int, name: str, *sources: str) -> ServerTensor:
        scales = (source + SCALE for source in sources if source + SCALE in names)
        return ServerTensor(rank, name, (*sources, *scales), layout)

    for rank in range(layout.ranks):
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            if mixture:
                experts = f"{prefix}mlp.experts."
                numbers = range(config.get("num_experts") or config["num_local_experts"])
                for joined, kinds in (("w13_weight", ["gate", "up"]), ("w2_weight", ["down"])):
                    sources = tuple(f"{experts}{each}.{kind}_proj.weight" for each in numbers for kind in kinds)
                    yield made_of(rank, experts + joined, *sources)
            for fused, parts in fused_of_layer.items():
                for kind in ("weight", "bias"):
                    sources = tuple(f"{prefix}{part}.{kind}" for part in parts)
                    if kind == "weight" or sources[0] in names:
                        yield made_of(rank, f"{prefix}{fused}.{kind}", *sources)
            for name in (*each_of_layer, *(name for name in _OPTIONAL if prefix + name in names)):
                yield made_of(rank, prefix + name, prefix + name)
        for name in whole:
            yield made_of(rank, name, name)


def _unquantized(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """A weight, [out, in]; of FP8 the product with its scales [out / block, in / block], bfloat16."""
    scale = tensors.get(name + SCALE)
    if scale is None:
        return tensors[name]
    blocks = tensors[name].unflatten(1, (scale.shape[1], -1)).unflatten(0, (scale.shape[0], -1))
    return (blocks.float() * scale[:, None, :, None]).to(torch.bfloat16).flatten(2).flatten(0, 1)


def server_dtype(info: ServerInfo, config: Mapping[str, Any]) -> torch.dtype:
    """Type of a server's tensors. SGLang's rule: "auto" is the config's dtype, but then float32 becomes float16."""
    name = info.dtype
    if name == "auto":
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
        name = "float16" if name == "float32" else name
    if name not in _DTYPES:
        raise ValueError(f"the server's dtype {name!r} is not one of {sorted(_DTYPES)}")
    return _DTYPES[name]


def _multiple(size: int, step: int) -> int:
    return -(-size // step) * step
