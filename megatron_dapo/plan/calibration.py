"""The planner's constants, each with unit and source; one file, which a measurement may replace."""

from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from megatron_dapo.config.base import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Values of `calibration.yaml`, where each one's unit stands."""

    gpu_memory: float
    peak_flops: float
    memory_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    gpus_per_node: float
    train_efficiency: float
    forward_efficiency: float
    prefill_efficiency: float
    communication_efficiency: float
    decode_efficiency: float
    decode_overhead: float
    decode_reduce_latency: float
    framework_memory: float
    fragmentation: float
    process_memory: float
    disk_write: float
    disk_read: float
    gather_bandwidth: float
    checksum_bandwidth: float
    mean_response: float
    response_sigma: float
    difficulty_share: float
    mean_prompt: float

    def link(self, ranks: int) -> float:
        """Bytes/s that collectives of `ranks` neighbouring GPUs reach: NVLink inside a node, else the network."""
        inside = ranks <= self.gpus_per_node
        return (self.nvlink_bandwidth if inside else self.network_bandwidth) * self.communication_efficiency


_MAY_BE_ZERO = {"decode_overhead", "decode_reduce_latency", "fragmentation", "difficulty_share", "framework_memory"}
_SHARES = {name.name for name in fields(Calibration) if name.name.endswith(("efficiency", "share"))}


def load_calibration(file: Path | None = None) -> Calibration:
    """The constants of `file`, or those that come with the package.

    Raises:
        ConfigError: a constant is missing, unknown, without unit or source, or no sensible number.
    """
    shown = file or "calibration.yaml of the package"
    try:
        text = file.read_text() if file else (resources.files(__package__) / "calibration.yaml").read_text()
        given = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{shown}: {error}; give a YAML file as megatron_dapo/plan/calibration.yaml") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{shown}: expected constants, found {type(given).__name__}")
    known = [field.name for field in fields(Calibration)]
    wrong = [f"{name}: no such constant" for name in given if name not in known]
    wrong += [f"{name}: missing" for name in known if name not in given]
    wrong += [f"{name}: {fault}" for name in known if name in given and (fault := _fault(name, given[name]))]
    if wrong:
        raise ConfigError("\n".join(f"{shown}: {line}" for line in wrong))
    return Calibration(**{name: float(given[name]["value"]) for name in known})


def _fault(name: str, entry: Any) -> str | None:
    if not isinstance(entry, dict) or set(entry) != {"value", "unit", "source"}:
        return "write it as {value: NUMBER, unit: TEXT, source: TEXT}"
    value = entry["value"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"value = {value!r}: must be a number (YAML takes 1.0e+9 for one, not 1e9)"
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        return f"value = {value:g}: must be above 0"
    if name in _SHARES and value > 1:
        return f"value = {value:g}: is a share, at most 1"
    return None
