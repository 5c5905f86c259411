"""What is planned: a config, its model, the hardware's constants, and what the user assumes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.plan.calibration import Calibration
from megatron_dapo.plan.lengths import Workload, highest_pass_rate
from megatron_dapo.plan.rank_state import DTYPE_BYTES, model_parameters

Changes = Mapping[str, Any]
"""{"actor.recompute": "full"}: keys of a config and other values for them."""


def changed(config: Any, changes: Changes) -> Any:
    """`config`, or a section of it, with the keys in `changes` set."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        name, dot, rest = key.partition(".")
        if dot:
            below.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    sections = {name: changed(getattr(config, name), keys) for name, keys in below.items()}
    return dataclasses.replace(config, **own, **sections)


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
    pass_rate: float | None = None
    """None: the config's `initial_pass_rate`."""

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
        """Lengths and pass rate.

        Raises:
            ConfigError: the pass rate is impossible.
        """
        config, constants, group = self.config, self.constants, self.config.algorithm.group_size
        rate = self.pass_rate or config.algorithm.dynamic_sampling.initial_pass_rate
        if not 0 < rate < 1:
            raise ConfigError(f"pass rate {rate:g}: must be above 0 and below 1; give --pass-rate")
        return Workload(
            mean_response=constants.mean_response,
            sigma=constants.response_sigma,
            difficulty_share=constants.difficulty_share,
            mean_prompt=min(constants.mean_prompt, config.data.max_prompt_tokens),
            pass_rate=min(rate, highest_pass_rate(group)),
            longest=config.rollout.max_new_tokens,
            group_size=group,
        )
