"""The planner's constants, each with unit and source; one file, which a measurement may replace."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron_dapo.config.base import ConfigError, Fraction, NonNegativeFloat, PositiveFloat


class _Entry(BaseModel, extra="forbid", strict=True):
    """One constant in the file."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid"))
class Calibration:
    """Values of `calibration.yaml`, where each one's unit stands."""

    gpu_memory: PositiveFloat
    peak_flops: PositiveFloat
    memory_bandwidth: PositiveFloat
    nvlink_bandwidth: PositiveFloat
    network_bandwidth: PositiveFloat
    host_bandwidth: PositiveFloat
    gpus_per_node: PositiveFloat
    train_efficiency: Fraction
    forward_efficiency: Fraction
    prefill_efficiency: Fraction
    communication_efficiency: Fraction
    decode_efficiency: Fraction
    decode_overhead: NonNegativeFloat
    decode_reduce_latency: NonNegativeFloat
    framework_memory: NonNegativeFloat
    fragmentation: NonNegativeFloat
    process_memory: PositiveFloat
    disk_write: PositiveFloat
    disk_read: PositiveFloat
    gather_bandwidth: PositiveFloat
    checksum_bandwidth: PositiveFloat
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


def load_calibration(file: Path | None = None) -> Calibration:
    """The constants of `file`, or those that come with the package.

    Raises:
        ConfigError: a constant is missing, unknown, without unit or source, or no sensible number.
    """
    own, shown = resources.files(__package__) / "calibration.yaml", file or "calibration.yaml of the package"
    try:
        entries = TypeAdapter(dict[str, _Entry]).validate_python(yaml.safe_load((file or own).read_text()))
        return Calibration(**{name: entry.value for name, entry in entries.items()})
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, one['loc']))} = {one['input']!r}: {one['msg']}" for one in error.errors()]
        raise ConfigError("\n".join(f"{shown}: {line}" for line in wrong)) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{shown}: {error}; give a YAML file as megatron_dapo/plan/calibration.yaml") from None
