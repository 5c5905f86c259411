"""The sizes of the model to plan for: its folder's config.json, or built-in ones where the folder is not there yet."""

from importlib import resources
from pathlib import Path

import yaml

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config.base import ConfigError

_MODELS = yaml.safe_load((resources.files(__package__) / "models.yaml").read_text())

BUILT_IN = {name: HFModelConfig.of(fields, shown=f"models.yaml, {name}") for name, fields in _MODELS.items()}
"""By the name of the model's folder, as the models are published."""


def model_dimensions(path: str) -> tuple[HFModelConfig, str]:
    """The sizes of the model in folder `path`, and where they were found.

    Raises:
        ConfigError: the folder has no config.json and its name is not a built-in one, or the config is not supported.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return HFModelConfig.load(folder), str(folder / "config.json")
    if folder.name in BUILT_IN:
        return BUILT_IN[folder.name], f"built-in shape of {folder.name}; {folder} is not there"
    raise ConfigError(
        f"model.path = {path}: no config.json there, and no built-in shape of that folder's name "
        f"({', '.join(BUILT_IN)}); give the folder of the model, or only its config.json in a folder"
    )
