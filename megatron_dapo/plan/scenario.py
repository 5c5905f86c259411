"""What is planned: a config, its model, and constants.

The model's sizes come from its folder's config.json, or are built-in ones where the folder is not there yet."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.plan.calibration import Calibration
from megatron_dapo.plan.lengths import Workload
from megatron_dapo.plan.rank_state import DTYPE_BYTES, model_parameters

_MODELS = yaml.safe_load((resources.files(__package__) / "models.yaml").read_text())

BUILT_IN = {name: HFModelConfig.of(fields, shown=f"models.yaml, {name}") for name, fields in _MODELS.items()}
"""By the name of the model's folder, as the models are published."""

Changes = Mapping[str, Any]
"""{"actor.recompute": "full"}: keys of a config and other values for them."""


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


def changed(config: Any, changes: Changes) -> Any:
    """`config`, or a section of it, with the keys in `changes` set."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        config = dataclasses.replace(config, **{name: changed(getattr(config, name), {rest: value}) if rest else value})
    return config


def share_gpus(config: Config) -> bool:
    """`run.mode: colocated`. And one trainer rank and one server of one GPU: they take turns on the same one, if a
    machine has no other."""
    rollout = config.rollout
    if config.run.mode == "colocated":
        return True
    return not rollout.urls and config.actor.layout.world_size == rollout.servers * rollout.tensor_parallel == 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a plan depends on."""

    config: Config
    hf: HFModelConfig
    constants: Calibration

    def changed(self, changes: Changes) -> "Scenario":
        """With keys of the config set."""
        return dataclasses.replace(self, config=changed(self.config, changes))

    @property
    def dtype_bytes(self) -> int:
        """Of a weight."""
        return DTYPE_BYTES[self.config.model.dtype]

    @property
    def model_bytes(self) -> float:
        """Of the whole model's weights."""
        return float(model_parameters(self.hf) * self.dtype_bytes)

    @property
    def servers(self) -> int:
        """How many, whoever runs them."""
        return len(self.config.rollout.urls) or self.config.rollout.servers

    @property
    def server_gpus(self) -> int:
        """Of all servers."""
        return self.servers * self.config.rollout.tensor_parallel

    @property
    def gpus(self) -> int:
        """Of trainer and servers together, those that both use counted once."""
        return self.config.actor.layout.world_size + (0 if share_gpus(self.config) else self.server_gpus)

    @property
    def workload(self) -> Workload:
        """Lengths and pass rate."""
        config, constants, group = self.config, self.constants, self.config.algorithm.group_size
        rate = constants.pass_rate or config.algorithm.dynamic_sampling.initial_pass_rate
        return Workload(
            mean_response=constants.mean_response,
            sigma=constants.response_sigma,
            difficulty_share=constants.difficulty_share,
            mean_prompt=min(constants.mean_prompt, config.longest_prompt),
            pass_rate=min(rate, 1 - 2 * 0.5**group),  # no more are kept than where each is right in half the cases
            longest=config.rollout.max_new_tokens,
            group_size=group,
        )
