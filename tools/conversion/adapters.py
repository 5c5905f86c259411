"""Merges a checkpoint of LoRA adapters into the model that they were trained on, as training does it (see
megatron_dapo/actor/weights/lora.py)."""

from pathlib import Path
from typing import Any

from megatron_dapo.actor.model.hf_config import HFModelConfig
from megatron_dapo.actor.weights.hf_files import FolderPlan, SafetensorsReader
from megatron_dapo.actor.weights.lora import adapter_files, adapter_shards
from megatron_dapo.actor.weights.model_tensors import check_weights, hf_shapes
from megatron_dapo.config.actor_config import LoraConfig
from megatron_dapo.config.base import ConfigError
from tools.conversion.megatron_files import CheckpointReader
from tools.conversion.stored import Stored, in_dtype
from tools.conversion.workers import Counter
from tools.rank_pool import RankPlace


class Adapters:
    """Those of the checkpoint `source`, whose `actor.json` says `extra`, for the model in `base`.

    Raises:
        ConfigError: they were trained on another model.
        WeightsError: one is missing or partial.
    """

    def __init__(self, source: Path, base: Path, extra: dict[str, Any]) -> None:
        self.source, self.base, self.lora = source, base, LoraConfig(**extra["lora"])
        hf = HFModelConfig.load(base)
        with SafetensorsReader(base) as weights:
            check_weights(weights, hf)
            if weights.digest() != extra["base"]:
                raise ConfigError(f"{source}: its adapters were trained on other weights than {base}'s; give --base")
            self.dtypes = {name: weights.dtype(name) for name in hf_shapes(hf)}
        self.halves = {
            tensor: Stored(name=name, key=name, at=(), of=(), shards=shards)
            for name, shards in adapter_shards(hf, self.lora).items()
            for tensor in shards.shapes
        }
        """Where A and B are, by PEFT's names."""
        reader = CheckpointReader(source)
        for half in self.halves.values():
            reader.check(half)

    def write_part(
        self, partial: Path, plan: FolderPlan, place: RankPlace, parameters: list[Stored], counter: Counter
    ) -> None:
        """Put one worker's tensors in their places: of the base in the type that is written, merged in float32, rounded
        once."""
        adapters = CheckpointReader(self.source)
        with SafetensorsReader(self.base) as weights:
            for name in (name for stored in parameters for name in stored.shards.shapes):
                tensor = in_dtype(weights.read(name, 0, 0, plan.shapes[name][0]), plan.dtype)
                path = f"base_model.model.{name.removesuffix('.weight')}.lora_"
                if f"{path}A.weight" in self.halves:
                    first, second = (adapters.read(self.halves[f"{path}{half}.weight"]) for half in "AB")
                    tensor = (second @ first).mul_(self.lora.scale).add_(tensor).to(plan.dtype)
                plan.write(partial, name, tensor)
                counter.add(place, tensor.nbytes)

    def write_peft(self, folder: Path) -> None:
        """The adapters in PEFT's format."""
        reader = CheckpointReader(self.source)
        tensors = {name: reader.read(half) for name, half in self.halves.items()}
        for path, content in adapter_files(self.lora, tensors, str(self.base.absolute())).items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(content)
