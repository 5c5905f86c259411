"""The shape of the model to plan for: its folder's config.json, or a built-in one where the folder is not there yet."""

from dataclasses import dataclass
from pathlib import Path

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config.base import ConfigError


def _qwen(model_type: str = "qwen2", **fields: int | bool | float) -> HFModelConfig:
    common = {
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "norm_epsilon": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "tied": False,
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type == "qwen3",
    }
    return HFModelConfig(model_type=model_type, **(common | fields))  # type: ignore[arg-type]


BUILT_IN = {
    "Qwen2.5-32B": _qwen(
        num_layers=64,
        hidden_size=5120,
        ffn_hidden_size=27648,
        num_attention_heads=40,
        num_query_groups=8,
        vocab_size=152064,
        norm_epsilon=1e-5,
    ),
    "Qwen2.5-7B": _qwen(
        num_layers=28,
        hidden_size=3584,
        ffn_hidden_size=18944,
        num_attention_heads=28,
        num_query_groups=4,
        vocab_size=152064,
    ),
    "Qwen2.5-1.5B": _qwen(
        num_layers=28,
        hidden_size=1536,
        ffn_hidden_size=8960,
        num_attention_heads=12,
        num_query_groups=2,
        vocab_size=151936,
        tied=True,
    ),
    "Qwen3-32B": _qwen(
        "qwen3",
        num_layers=64,
        hidden_size=5120,
        ffn_hidden_size=25600,
        num_attention_heads=64,
        num_query_groups=8,
        vocab_size=151936,
        max_position_embeddings=40960,
    ),
}
"""By the name of the model's folder, as the models are published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model's sizes and where they were found."""

    hf: HFModelConfig
    source: str


def model_shape(path: str) -> ModelShape:
    """The shape of the model in folder `path`.

    Raises:
        ConfigError: the folder has no config.json and its name is not a built-in one, or the config is not supported.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return ModelShape(hf=HFModelConfig.load(folder), source=str(folder / "config.json"))
    if folder.name in BUILT_IN:
        return ModelShape(hf=BUILT_IN[folder.name], source=f"built-in shape of {folder.name}; {folder} is not there")
    raise ConfigError(
        f"model.path = {path}: no config.json there, and no built-in shape of that folder's name "
        f"({', '.join(BUILT_IN)}); give the folder of the model, or only its config.json in a folder"
    )
