"""A Hugging Face `config.json` as Megatron-Core sees it: Qwen2, Qwen3, Qwen3-MoE and Llama 3.

What Megatron would compute differently from the field's meaning is refused with the field's name and value.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import AliasChoices, BaseModel, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from megatron_dapo.config.base import ConfigError
from megatron_dapo.data.hub import read_json

if TYPE_CHECKING:
    import torch

MIXTURE = "qwen3_moe"

_FAMILIES: Mapping[str, Mapping[str, bool]] = {
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
    MIXTURE: {"qkv_bias": False, "qk_norm": True},
    "llama": {"qkv_bias": False, "qk_norm": False},
}

# Fields whose other values change the computation, and the only value that is computed here.
_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    # Every layer has experts, and no others than these.
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


_KINDS = {"model_type": (str, "a text"), "layer_types": (list, "a list"), "rope_scaling": (dict, "an object"),
          "rope_parameters": (dict, "an object")}  # fmt: skip


class Llama3Scaling(BaseModel, frozen=True, strict=True, allow_inf_nan=False):
    """RoPE scaling of Llama 3.1 and later: long wavelengths are stretched by `factor`, short ones are kept."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


class Experts(BaseModel, frozen=True, strict=True):
    """The mixture of experts in every layer: each token goes to the `top_k` of them that the router gives most."""

    count: PositiveInt = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))
    top_k: PositiveInt = Field(validation_alias="num_experts_per_tok")
    ffn_hidden_size: PositiveInt = Field(validation_alias="moe_intermediate_size")
    """Of one expert."""

    normalised: bool = Field(default=False, validation_alias="norm_topk_prob")
    """The chosen experts' weights sum to 1; else they are their shares among all experts."""

    @model_validator(mode="after")
    def _top_k_fits(self) -> Self:
        if self.top_k > self.count:
            raise ValueError(f"num_experts_per_tok = {self.top_k}: must not exceed num_experts = {self.count}")
        if self.top_k == 1 and self.normalised:
            raise ValueError("num_experts_per_tok = 1: with norm_topk_prob the router would have no gradient")
        return self


class HFModelConfig(BaseModel, frozen=True, strict=True, allow_inf_nan=False):
    """The shape of a model; names as in Megatron, sizes of the whole model (not of a rank)."""

    num_layers: PositiveInt = Field(validation_alias="num_hidden_layers")
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt = Field(validation_alias="intermediate_size")
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt = Field(
        validation_alias="num_key_value_heads", default_factory=lambda known: known["num_attention_heads"]
    )
    head_dim: PositiveInt = Field(default_factory=lambda known: known["hidden_size"] // known["num_attention_heads"])
    vocab_size: PositiveInt
    """The true one, without the rows that pad it to a multiple of the tensor-parallel size."""

    max_position_embeddings: PositiveInt
    norm_epsilon: PositiveFloat = Field(validation_alias="rms_norm_eps")
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: Llama3Scaling | None = None
    tied: bool = Field(default=False, validation_alias="tie_word_embeddings")
    """The output layer is the embedding."""

    qkv_bias: bool
    qk_norm: bool
    """Queries and keys are normalised per head (Qwen3)."""

    experts: Experts | None = None
    """None: a dense model. Else no layer has a dense MLP, and `ffn_hidden_size` means nothing."""

    @classmethod
    def load(cls, folder: Path) -> "HFModelConfig":
        """Read `folder/config.json`.

        Raises:
            ConfigError: a field has a value that Megatron's model of ours does not represent, or is missing; or the
                file cannot be read as an object in JSON.
        """
        file = Path(folder) / "config.json"
        return cls.of(read_json(file), shown=str(file))

    @classmethod
    def of(cls, fields: Mapping[str, Any], *, shown: str) -> "HFModelConfig":
        """The same from a config.json's content; `shown` names it in errors."""
        given = {name: value for name, value in fields.items() if value is not None}
        for name, (kind, called) in _KINDS.items():
            if not isinstance(given.get(name, kind()), kind):
                raise ConfigError(f"{shown}: {name} = {given[name]!r}: must be {called}")
        rope = _rope(given)
        problems = list(_unsupported(given, rope))
        try:
            if not problems:
                scaled = rope.get("rope_type") == "llama3"
                experts = given if given["model_type"] == MIXTURE else None
                made = {**rope, "rope_scaling": rope if scaled else None, "experts": experts}
                return cls.model_validate({**given, **made, **_FAMILIES[given["model_type"]]})
        except ValidationError as error:
            problems = [_text(fault) for fault in error.errors() if fault["type"] != "default_factory_not_called"]
        raise ConfigError("\n".join(f"{shown}: {problem}" for problem in problems))

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        heads, groups, hidden = self.num_attention_heads, self.num_query_groups, self.hidden_size
        if heads % groups:
            raise ValueError(f"num_key_value_heads = {groups}: must divide num_attention_heads = {heads}")
        if "head_dim" not in self.model_fields_set and hidden % heads:
            raise ValueError(f"num_attention_heads = {heads}: must divide hidden_size = {hidden}, or give head_dim")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even")
        if self.experts is not None and self.tied:
            own = "SGLang's Qwen3-MoE has a head of its own, which nothing would set"
            raise ValueError(f"tie_word_embeddings = True: {own}; save the model with lm_head.weight")
        return self

    def inverse_frequencies(self) -> "torch.Tensor":
        """Rotary frequencies, float32 [head_dim / 2], in radians a position."""
        import torch  # here: a config is checked without waiting seconds for it

        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        plain, scaling = 1.0 / self.rope_theta**exponents, self.rope_scaling
        if scaling is None:
            return plain
        length, wavelength = scaling.original_max_position_embeddings, 2 * math.pi / plain
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        # 1 for wavelengths short enough to be kept, 0 for those stretched in full, linear in frequency between.
        kept = ((length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return kept * plain + (1 - kept) * plain / scaling.factor


MOST_REPLAYED = 256
"""Experts that routing replay can tell apart: a choice is one byte."""


BLOCK = 128
"""Rows and columns of an FP8 block of `rollout.quantization`."""


def check_blocks(hf: HFModelConfig, quantization: str, ranks: int) -> None:
    """Raise ConfigError if `rollout.quantization` is one that `block_problem` has something against."""
    if quantization != "none" and (problem := block_problem(hf, ranks)):
        raise ConfigError(f"rollout.quantization = {quantization}: {problem}")


def block_problem(hf: HFModelConfig, ranks: int) -> str | None:
    """Why SGLang could not load FP8 weights; None: a server rank's share of every projection is whole blocks.

    Args:
        ranks: `rollout.tensor_parallel`.
    """
    if not (hf.qkv_bias or hf.qk_norm):  # SGLang 0.5.17 gives the scales of such a model another name, and drops them
        return "SGLang loads no scales of blocks into Llama; set it to none"
    queries, keys = hf.num_attention_heads * hf.head_dim, hf.num_query_groups * hf.head_dim
    ffn = hf.ffn_hidden_size if hf.experts is None else hf.experts.ffn_hidden_size
    # If there are fewer key heads than ranks, several ranks have the same one.
    shares = {"hidden": (hf.hidden_size, 1), "query": (queries, ranks), "intermediate": (ffn, ranks)}
    shares["key and value"] = (keys, min(ranks, hf.num_query_groups))
    for what, (size, parts) in shares.items():
        if size % (parts * BLOCK):
            shared = f"the model's {what} size {size} over {parts} server ranks"
            remedy = f"{'lower rollout.tensor_parallel, or ' if parts > 1 else ''}set it to none"
            return f"rounds blocks of {BLOCK} x {BLOCK}, and {shared} is no multiple of {BLOCK}; {remedy}"
    return None


def check_actor(hf: HFModelConfig, actor: ActorConfig) -> None:
    """`check_layout`, and raise ConfigError where experts cannot be computed as the config says."""
    check_layout(hf, actor.layout)
    for key, value, off in (("fp8", actor.fp8, "none"), ("lora.rank", actor.lora.rank, 0)):
        if hf.experts is not None and value != off:
            raise ConfigError(f"actor.{key} = {value}: not supported for a mixture of experts; set it to {off}")
    experts = hf.experts.count if hf.experts is not None else 0
    if actor.routing_replay and not 0 < experts <= MOST_REPLAYED:
        told = f"the model has {experts} experts, and it needs 1 to {MOST_REPLAYED}"
        raise ConfigError(f"actor.routing_replay = true: {told}; set it to false")
    layers = hf.num_layers // (actor.layout.pipeline * (actor.layout.virtual_pipeline or 1))
    if isinstance(actor.recompute, int) and actor.recompute > layers:
        raise ConfigError(f"actor.recompute = {actor.recompute}: a stage's chunk has {layers} layers; set it to full")
    parts = actor.recompute if isinstance(actor.recompute, tuple) else ()
    other, kind = ("moe", "no experts") if hf.experts is None else ("mlp", "experts in place of each mlp")
    if other in parts:
        raise ConfigError(f"actor.recompute: {other}: the model has {kind}; leave it out")
    if "layernorm" in parts and hf.experts is None:
        raise ConfigError("actor.recompute: layernorm: only the one before experts; leave it out")
    if "moe" in parts and actor.routing_replay:
        # A layer's rows of routing are those of its newest forward pass, which may be another micro-batch's by then.
        raise ConfigError("actor.recompute: moe: not with routing_replay; set a number of layers, or full")


def check_layout(hf: HFModelConfig, layout: LayoutConfig) -> None:
    """Raise ConfigError where the layout's ranks cannot each get an equal share of the model, or its experts' gradients
    would not be whole."""
    divided = [("tensor", layout.tensor, "num_key_value_heads", hf.num_query_groups)]
    if hf.experts is None:
        divided.append(("tensor", layout.tensor, "intermediate_size", hf.ffn_hidden_size))
        for key, size in (("expert", layout.expert), ("expert_tensor", layout.expert_tensor)):
            if size > 1:
                raise ConfigError(f"actor.layout.{key} = {size}: the model has no experts; set it to 1")
    else:
        divided.append(("expert", layout.expert, "num_experts", hf.experts.count))
        divided.append(("expert_tensor", layout.expert_tensor, "moe_intermediate_size", hf.experts.ffn_hidden_size))
        if layout.tensor > 1 and not layout.sequence_parallel:
            told = f"layout.tensor = {layout.tensor} each of those ranks would send every token to the experts"
            raise ConfigError(f"actor.layout.sequence_parallel = false: with experts and {told}; set it to true")
        # Megatron then sums the experts' gradients over the same ranks as the dense ones'.
        if layout.expert == 1 and layout.expert_tensor != layout.tensor:
            rule = f"with layout.expert = 1 it must be layout.tensor = {layout.tensor}; or set layout.expert above 1"
            raise ConfigError(f"actor.layout.expert_tensor = {layout.expert_tensor}: {rule}")
    for key, ranks, name, size in divided:
        if size % ranks:
            raise ConfigError(f"actor.layout.{key} = {ranks}: must divide the model's {name} = {size}")
    if -(-hf.vocab_size // layout.tensor) * (layout.tensor - 1) >= hf.vocab_size:
        raise ConfigError(f"actor.layout.tensor = {layout.tensor}: leaves a rank none of {hf.vocab_size} tokens")
    stages = layout.pipeline * (layout.virtual_pipeline or 1)
    if hf.num_layers % stages:
        of_model = f"the model's num_hidden_layers = {hf.num_layers}"
        raise ConfigError(f"actor.layout.pipeline x virtual_pipeline = {stages}: must divide {of_model}")


def _unsupported(fields: Mapping[str, Any], rope: Mapping[str, Any]) -> Iterator[str]:
    """What Megatron's model of ours would compute otherwise."""
    model_type = fields.get("model_type")
    if model_type not in _FAMILIES:
        yield f"model_type = {model_type!r}: not supported; known: {', '.join(_FAMILIES)}"
    for key, value in _FIXED.items():
        if fields.get(key, value) != value:
            yield f"{key} = {fields[key]!r}: only {value!r} is supported"
    layer_types = set(fields.get("layer_types", ()))
    if fields.get("use_sliding_window") and layer_types != {"full_attention"}:
        yield "use_sliding_window = True: sliding-window attention is not supported; every layer must be full_attention"
    elif layer_types - {"full_attention"}:
        yield f"layer_types = {sorted(layer_types)}: only full_attention is supported"
    if rope["rope_type"] not in ("default", "llama3"):
        yield f"rope type = {rope['rope_type']!r}: only default and llama3 are supported"


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    rope = fields.get("rope_scaling", {}) | fields.get("rope_parameters", {})
    theta = {"rope_theta": fields["rope_theta"]} if "rope_theta" in fields else {}
    return {**theta, **rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _text(fault: Any) -> str:
    if fault["type"] == "value_error":  # of a validator above
        return str(fault["ctx"]["error"])
    value = "" if fault["type"] == "missing" else f" = {fault['input']!r}"
    return f"{'.'.join(map(str, fault['loc'])).removeprefix('experts.')}{value}: {fault['msg']}"
