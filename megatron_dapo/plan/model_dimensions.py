"""The sizes of the model to plan for: its folder's config.json, or built-in ones where the folder is not there yet."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config.base import ConfigError

_MODELS = yaml.safe_load((resources.files(__package__) / "models.yaml").read_text())

BUILT_IN = {name: HFModelConfig.of(fields, shown=f"models.yaml, {name}") for name, fields in _MODELS.items()}
"""By the name of the model's folder, as the models are published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDimensions:
    """A model's sizes and where they were found."""

    hf: HFModelConfig
    source: str


def model_dimensions(path: str) -> ModelDimensions:
    """The sizes of the model in folder `path`.

    Raises:
        ConfigError: the folder has no config.json and its name is not a built-in one, or the config is not supported.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return ModelDimensions(hf=HFModelConfig.load(folder), source=str(folder / "config.json"))
    if folder.name in BUILT_IN:
        source = f"built-in shape of {folder.name}; {folder} is not there"
        return ModelDimensions(hf=BUILT_IN[folder.name], source=source)
    raise ConfigError(
        f"model.path = {path}: no config.json there, and no built-in shape of that folder's name "
        f"({', '.join(BUILT_IN)}); give the folder of the model, or only its config.json in a folder"
    )
