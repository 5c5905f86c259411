"""Run as a process by test_transformer_engine: the actor's parts over TransformerEngine's real Python (te_stub).

    python -m tests.emulated.te_session MODEL FOLDER

Writes checkpoints with and without TransformerEngine's layers to FOLDER, reads each with the other, and prints what it
saw as JSON in its last line.
"""

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.emulated import te_stub


def main(model: Path, folder: Path) -> dict[str, Any]:
    te_stub.install()
    from megatron_dapo.actor.device import cpu
    from megatron_dapo.actor.model.hf_config import HFModelConfig

    hf = HFModelConfig.load(model)
    here = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
    cpu.install()
    sys.modules.update(here)  # what a CPU rank must not see is what this process is about
    torch.cuda.is_available = lambda: True  # asked when a layer is built
    _join_alone(folder)
    with_te, without = (_optimizer(model, transformer_engine=answer) for answer in (True, False))
    keys = [set(optimizer.chunks[0].module.state_dict()) for optimizer in (with_te, without)]
    seen = {
        "only with": sorted(keys[0] - keys[1]),
        "names": _same_names(hf, with_te, without),
        "stateless recipes": _stateless_recipes(),
        "workspaces": _workspaces_after_offload(with_te),
    }
    for name, writer, reader in (("with", with_te, without), ("without", without, with_te)):
        seen[name] = _across(folder / name, writer, reader)
    return seen


def _join_alone(folder: Path) -> None:
    from megatron_dapo.actor.device import DeviceChoice, process_groups
    from megatron_dapo.config.actor_config import LayoutConfig

    process_groups.initialise(
        LayoutConfig(),
        rank=0,
        world_size=1,
        rendezvous=f"file://{folder}/rendezvous",
        device=DeviceChoice(device=torch.device("cpu"), backend="gloo"),
        timeout_s=60,
        seed=1,
    )


def _optimizer(model: Path, *, transformer_engine: bool) -> Any:
    """The model of one rank with random weights, and its optimizer."""
    from megatron_dapo.actor.device import DeviceChoice, adam
    from megatron_dapo.actor.model.hf_config import HFModelConfig
    from megatron_dapo.actor.model.model_chunks import build_model
    from megatron_dapo.actor.optimizer import ActorOptimizer
    from megatron_dapo.actor.step_data import LearningRate
    from megatron_dapo.config.actor_config import ActorConfig

    adam.put_in_place()
    config = ActorConfig()
    choice = DeviceChoice(device=torch.device("cpu"), backend="gloo", transformer_engine=transformer_engine)
    chunks = build_model(HFModelConfig.load(model), config, "bfloat16", choice)
    for parameter in chunks[0].parameters():
        torch.nn.init.normal_(parameter)
    rate = LearningRate.of(config.optimizer, steps_per_rollout=1)
    return ActorOptimizer(chunks, config.optimizer, rate, overlap=False)


def _same_names(hf: Any, *optimizers: Any) -> list[str]:
    """Our names of parameters with the shapes that the shards of a rank have, if both sides give the same."""
    from megatron_dapo.actor.weights.hf_weights import named_parameters
    from megatron_dapo.actor.weights.model_tensors import model_shards

    one, other = (
        {name: list(parameter.shape) for name, parameter in named_parameters(optimizer.chunks, hf)}
        for optimizer in optimizers
    )
    wanted = {name: list(shards.local_shape(1)) for name, shards in model_shards(hf).items()}
    return sorted(wanted) if one == other == wanted else []


def _across(folder: Path, writer: Any, reader: Any) -> dict[str, Any]:
    """Save one, load it into the other: whether weights and master weights arrived."""
    from megatron_dapo.actor.checkpoint import checkpoint
    from megatron_dapo.config.actor_config import LayoutConfig

    checkpoint.begin(folder, writer, LayoutConfig(), background=False).finish()
    for parameter in reader.chunks[0].module.parameters():
        torch.nn.init.zeros_(parameter)
    checkpoint.load(folder, reader, LayoutConfig())
    saved, loaded = (_by_checkpoint_key(optimizer) for optimizer in (writer, reader))
    return {"equal": [key for key in saved if torch.equal(saved[key], loaded[key])], "all": list(saved)}


def _by_checkpoint_key(optimizer: Any) -> dict[str, torch.Tensor]:
    from megatron.core import parallel_state

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    shards = optimizer.chunks[0].module.sharded_state_dict(metadata=metadata)
    # Layer, and expert: of Megatron's sequence of them or of TransformerEngine's group.
    numbers = re.compile(r"(?:layers[.]|local_experts[.]|weight)([0-9]+)")
    return {
        f"{shard.key} {numbers.findall(key)}": shard.data.detach()
        for key, shard in shards.items()
        if "_extra_state" not in key
    }


def _stateless_recipes() -> list[str]:
    """Of the config's FP8 recipes those whose layers keep nothing for a checkpoint, as TransformerEngine sees it."""
    from typing import get_args, get_type_hints

    from megatron.core.fp8_utils import get_fp8_recipe
    from transformer_engine.pytorch._extra_state import is_stateless_recipe

    from megatron_dapo.config.actor_config import ActorConfig

    recipes = get_args(get_type_hints(ActorConfig)["fp8_recipe"])
    return [name for name in recipes if is_stateless_recipe(get_fp8_recipe(_Fp8(name)))]


class _Fp8:
    """What Megatron reads of its config to make a recipe."""

    fp8, fp8_dot_product_attention, fp8_multi_head_attention = "hybrid", False, False
    tp_only_amax_red = False

    def __init__(self, recipe: str) -> None:
        self.fp8_recipe = recipe


def _workspaces_after_offload(optimizer: Any) -> dict[str, int]:
    """How many layers have a place for FP8 weights, and how many weights are still there after an offload."""
    places = [module._fp8_workspaces for module in optimizer.chunks[0].modules() if hasattr(module, "_fp8_workspaces")]
    for place in places:
        place["weight"] = torch.zeros(4)
    optimizer.memory.offload("parameters")
    left = sum(len(place) for place in places)
    optimizer.memory.onload("parameters")
    return {"places": len(places), "left": left}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
