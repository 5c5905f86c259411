"""A Hugging Face `config.json` as Megatron-Core sees it: Qwen2, Qwen3 (dense) and Llama 3.

What Megatron would compute differently from the field's meaning is refused with the field's name and value.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.config.base import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1 and later: long wavelengths are stretched by `factor`, short ones are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HFModelConfig:
    """The shape of a model; names as in Megatron, sizes of the whole model (not of a rank)."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    """The true one, without the rows that pad it to a multiple of the tensor-parallel size."""

    max_position_embeddings: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied: bool
    """The output layer is the embedding."""

    qkv_bias: bool
    qk_norm: bool
    """Queries and keys are normalised per head (Qwen3)."""

    @classmethod
    def load(cls, folder: Path) -> "HFModelConfig":
        """Read `folder/config.json`.

        Raises:
            ConfigError: a field has a value that Megatron's model of ours does not represent, or is missing; or the
                file cannot be read as an object in JSON.
        """
        file = Path(folder) / "config.json"
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"no JSON ({error})"
            raise ConfigError(f"{file}: {reason}; give the folder of a model in Hugging Face format") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{file}: no object but {type(fields).__name__}; fetch the model's own again")
        return cls.of(fields, shown=str(file))

    @classmethod
    def of(cls, fields: Mapping[str, Any], *, shown: str) -> "HFModelConfig":
        """The same from a config.json's content; `shown` names it in errors."""
        problems = list(_problems(fields))
        if problems:
            raise ConfigError("\n".join(f"{shown}: {problem}" for problem in problems))
        rope = _rope(fields)
        heads = fields["num_attention_heads"]
        return cls(
            model_type=fields["model_type"],
            num_layers=fields["num_hidden_layers"],
            hidden_size=fields["hidden_size"],
            ffn_hidden_size=fields["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            vocab_size=fields["vocab_size"],
            max_position_embeddings=fields["max_position_embeddings"],
            norm_epsilon=fields["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rope_scaling=_llama3_scaling(rope),
            tied=fields.get("tie_word_embeddings", False),
            qkv_bias=_FAMILIES[fields["model_type"]]["qkv_bias"],
            qk_norm=_FAMILIES[fields["model_type"]]["qk_norm"],
        )

    def inverse_frequencies(self) -> "torch.Tensor":
        """Rotary frequencies, float32 [head_dim / 2], in radians a position."""
        import torch  # here: a config is checked without waiting seconds for it

        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        plain = 1.0 / self.rope_theta**exponents
        scaling = self.rope_scaling
        if scaling is None:
            return plain
        length = scaling.original_max_position_embeddings
        wavelength = 2 * math.pi / plain
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        # 1 for wavelengths short enough to be kept, 0 for those stretched in full, linear in frequency between.
        kept = ((length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return kept * plain + (1 - kept) * plain / scaling.factor


def check_layout(hf: HFModelConfig, layout: LayoutConfig) -> None:
    """Raise ConfigError where the layout's ranks cannot each get an equal share of the model."""
    for name, size in (("num_key_value_heads", hf.num_query_groups), ("intermediate_size", hf.ffn_hidden_size)):
        if size % layout.tensor:
            raise ConfigError(f"actor.layout.tensor = {layout.tensor}: must divide the model's {name} = {size}")
    stages = layout.pipeline * (layout.virtual_pipeline or 1)
    if hf.num_layers % stages:
        raise ConfigError(
            f"actor.layout.pipeline x virtual_pipeline = {stages}: must divide the model's num_hidden_layers = "
            f"{hf.num_layers}"
        )


_FAMILIES: Mapping[str, Mapping[str, bool]] = {
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
    "llama": {"qkv_bias": False, "qk_norm": False},
}

_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

# Fields whose other values change the computation, and the only value that is computed here.
_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


def _problems(fields: Mapping[str, Any]) -> Iterator[str]:
    model_type = fields.get("model_type")
    if model_type not in _FAMILIES:
        yield f"model_type = {model_type!r}: not supported; known: {', '.join(_FAMILIES)}"
        return
    yield from _shape_problems(fields)
    for key, value in _FIXED.items():
        given = fields.get(key)
        if given is not None and given != value:
            yield f"{key} = {given!r}: only {value!r} is supported"
    layer_types = set(fields.get("layer_types") or ())
    if fields.get("use_sliding_window") and layer_types != {"full_attention"}:
        yield "use_sliding_window = True: sliding-window attention is not supported; every layer must be full_attention"
    elif layer_types - {"full_attention"}:
        yield f"layer_types = {sorted(layer_types)}: only full_attention is supported"
    yield from _rope_problems(_rope(fields))


def _shape_problems(fields: Mapping[str, Any]) -> Iterator[str]:
    wrong = [key for key in _COUNTS if not _is_number(fields.get(key), int)]
    yield from (f"{key} = {fields.get(key)!r}: must be given, as a whole number above 0" for key in wrong)
    if not _is_number(fields.get("rms_norm_eps")):
        yield f"rms_norm_eps = {fields.get('rms_norm_eps')!r}: must be given, as a number above 0"
    if not isinstance(fields.get("tie_word_embeddings", False), bool):
        yield f"tie_word_embeddings = {fields['tie_word_embeddings']!r}: must be true or false"
    if wrong:
        return
    heads, groups, size = (fields.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if groups is not None and (not _is_number(groups, int) or heads % groups):
        yield f"num_key_value_heads = {groups!r}: must divide num_attention_heads = {heads}"
    if size is None and (fields["hidden_size"] % heads or fields["hidden_size"] // heads % 2):
        yield f"num_attention_heads = {heads}: must cut hidden_size = {fields['hidden_size']} into even heads"
    if size is not None and (not _is_number(size, int) or size % 2):
        yield f"head_dim = {size!r}: must be an even whole number above 0"


def _rope_problems(rope: Mapping[str, Any]) -> Iterator[str]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        yield f"rope type = {kind!r}: only default and llama3 are supported"
    numbers = ("rope_theta", *_LLAMA3) if kind == "llama3" else ("rope_theta",)
    for key in numbers:
        if not _is_number(rope.get(key, 10000.0 if key == "rope_theta" else None)):
            yield f"{key} = {rope.get(key)!r}: rotary embedding of type {kind} needs it, as a number above 0"


def _is_number(value: Any, kind: Any = (int, float)) -> bool:
    """Whether `value` is a finite number above 0 of a type."""
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < math.inf


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings: `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    rope = {"rope_theta": fields["rope_theta"]} if fields.get("rope_theta") else {}
    return {**rope, **(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}


def _llama3_scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    if (rope.get("rope_type") or rope.get("type")) != "llama3":
        return None
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
