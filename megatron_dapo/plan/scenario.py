"""What is planned: a config, its model, and the planner's constants.

The model's sizes come from its folder's config.json, or are built-in ones where the folder is not there yet. Each
constant has a unit and a source; they stand in one file, which a measurement may replace."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.config.base import Fraction
from megatron_dapo.config.load import read_yaml
from megatron_dapo.plan.rank_state import DTYPE_BYTES, MASTER_BYTES, STATE_BYTES, model_parameters, trained_parameters
from megatron_dapo.plan.rollout import Workload

_MODELS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text())

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
    if (name := folder.name.partition("@")[0]) in BUILT_IN:
        return BUILT_IN[name], f"built-in shape of {name}; {path} is not there"
    known = f"no built-in shape of that folder's name ({', '.join(BUILT_IN)})"
    raise ConfigError(f"model.path = {path}: no config.json there, and {known}; a folder with that file alone will do")


def changed(config: Any, changes: Changes) -> Any:
    """`config`, or a section of it, with the keys in `changes` set."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        config = replace(config, **{name: changed(getattr(config, name), {rest: value}) if rest else value})
    return config


def share_gpus(config: Config) -> bool:
    """`run.mode: colocated`. And one trainer rank and one server of one GPU: they use the same one, if a machine
    has no other."""
    rollout = config.rollout
    alone = not rollout.urls and config.actor.layout.world_size == rollout.servers * rollout.tensor_parallel == 1
    return alone or config.run.mode == "colocated"


class _Entry(BaseModel, extra="forbid", strict=True):
    """One constant in the file."""

    value: float
    unit: str
    source: str


@checked(frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid"))
class Calibration:
    """Values of `calibration.yaml`, where each one's unit stands."""

    gpu_memory: PositiveFloat
    peak_flops: PositiveFloat
    float32_flops: PositiveFloat
    memory_bandwidth: PositiveFloat
    nvlink_bandwidth: PositiveFloat
    network_bandwidth: PositiveFloat
    host_bandwidth: PositiveFloat
    gpus_per_node: PositiveFloat
    train_efficiency: Fraction
    forward_efficiency: Fraction
    expert_efficiency: Fraction
    expert_imbalance: Annotated[float, Field(ge=1)]
    prefill_efficiency: Fraction
    communication_efficiency: Fraction
    decode_efficiency: Fraction
    decode_overhead: NonNegativeFloat
    decode_reduce_latency: NonNegativeFloat
    framework_memory: NonNegativeFloat
    communicator_memory: NonNegativeFloat
    fragmentation: NonNegativeFloat
    process_memory: PositiveFloat
    disk_write: PositiveFloat
    disk_read: PositiveFloat
    gather_bandwidth: PositiveFloat
    send_bandwidth: PositiveFloat
    load_bandwidth: PositiveFloat
    hash_bandwidth: PositiveFloat
    cpu_step_s: PositiveFloat
    changed_share: Fraction
    mean_response: PositiveFloat
    response_sigma: NonNegativeFloat
    difficulty_share: Annotated[float, Field(ge=0, le=1)]
    mean_prompt: PositiveFloat
    pass_rate: Fraction | None = None
    """None: `algorithm.dynamic_sampling.initial_pass_rate`."""

    def link(self, ranks: int) -> float:
        """Bytes/s that collectives of `ranks` neighbouring GPUs reach: NVLink inside a node, else the network."""
        inside = ranks <= self.gpus_per_node
        return (self.nvlink_bandwidth if inside else self.network_bandwidth) * self.communication_efficiency

    def imbalance(self, layout: LayoutConfig) -> float:
        """Tokens that the busiest rank's experts get, over the mean; 1 where every rank has all experts."""
        return self.expert_imbalance if layout.expert > 1 else 1.0


def load_calibration(file: Path | None = None) -> Calibration:
    """The constants of `file`, or those that come with the package.

    Raises:
        ConfigError: a constant is missing, unknown, without unit or source, or no sensible number.
    """
    own, shown = Path(__file__).with_name("calibration.yaml"), file or "calibration.yaml of the package"
    try:
        entries = TypeAdapter(dict[str, _Entry]).validate_python(read_yaml(file or own)[0])
        return Calibration(**{name: entry.value for name, entry in entries.items()})
    except ValidationError as error:
        told = [(one, "" if "missing" in one["type"] else f" = {one['input']!r}") for one in error.errors()]
        wrong = [f"{'.'.join(map(str, one['loc']))}{value}: {one['msg']}" for one, value in told]
        raise ConfigError("\n".join(f"{shown}: {line}" for line in wrong)) from None


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a plan depends on."""

    config: Config
    hf: HFModelConfig
    constants: Calibration

    def changed(self, changes: Changes) -> "Scenario":
        """With keys of the config set."""
        return replace(self, config=changed(self.config, changes))

    @property
    def dtype_bytes(self) -> int:
        """Of a weight."""
        return DTYPE_BYTES[self.config.model.dtype]

    @property
    def model_bytes(self) -> float:
        """Of the whole model's weights."""
        return float(model_parameters(self.hf) * self.dtype_bytes)

    @property
    def projection_bytes(self) -> int:
        """Of a weight of a layer's projections at a server."""
        return self.dtype_bytes if self.config.rollout.quantization == "none" else 1

    @property
    def served_bytes(self) -> float:
        """Of a server's weights; FP8 scales are nothing beside them, nor are norms."""
        plain = self.hf.vocab_size * self.hf.hidden_size * (1 if self.hf.tied else 2)
        return self.model_bytes - (model_parameters(self.hf) - plain) * (self.dtype_bytes - self.projection_bytes)

    @property
    def checkpoint_bytes(self) -> float:
        """Of a checkpoint: the trained weights, and the optimizer's state."""
        actor = self.config.actor
        weight_bytes = MASTER_BYTES if actor.lora.rank else self.dtype_bytes
        return trained_parameters(self.hf, actor.lora) * (weight_bytes + sum(STATE_BYTES[actor.optimizer.compact]))

    @property
    def head_parameters(self) -> int:
        """Of an output layer that calculates in float32 (`model.fp32_head`); else 0."""
        return self.hf.vocab_size * self.hf.hidden_size if self.config.model.upcasts_head else 0

    @property
    def weight_sync(self) -> str:
        """`rollout.weight_sync`, decided for GPUs."""
        return self.config.way_of_weights(on_gpus=True)

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
            longest=config.rollout.longest_response,
            group_size=group,
        )
