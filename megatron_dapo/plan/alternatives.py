"""What to change where a config does not fit, and how other splits between trainer and servers would do."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dapo.actor.model.hf_config import HFModelConfig, check_layout
from megatron_dapo.config import Config, ConfigError
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.config.root import contradictions
from megatron_dapo.plan.calibration import Calibration
from megatron_dapo.plan.plan import Assumptions, Plan, find_misfits, make_plan, share_gpus

Changes = Mapping[str, Any]
"""{"actor.recompute": "full"}: keys of a config and other values for them."""

_LARGEST_TENSOR = 8
_LARGEST_PIPELINE = 16
_ROWS = 12
_ROWS_A_SIZE = 3


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


def remedies(config: Config, hf: HFModelConfig, constants: Calibration, gpu_memory: float) -> list[Changes]:
    """The least that makes it fit: what costs time only, else more GPUs. Nothing: no such change is known.

    First the trainer's, then the servers' way with the trainer's taken: two are meant together, since both may share
    GPUs. Of one that would not help without breaking the other nothing is said.
    """

    def misfits(other: Config) -> set[str]:
        return {one.part for one in find_misfits(other, hf, constants, gpu_memory)}

    now = misfits(config)
    found: list[Changes] = []
    for part, ways in (("trainer", _trainer_ways(config, hf)), ("server", _server_ways(config))):
        if part in now:
            way = next((way for way in ways if misfits(changed(config, way)) <= now - {part}), None)
            if way is not None:
                found.append(way)
                config, now = changed(config, way), now - {part}
    return found


def _trainer_ways(config: Config, hf: HFModelConfig) -> list[Changes]:
    actor = config.actor
    budgets = [{}, {"actor.micro_batch_tokens": config.model.context_length}]
    recomputes: list[dict[str, Any]] = [{}] if actor.recompute == "full" else [{}, {"actor.recompute": "full"}]
    fused = [{}] if actor.fused_linear_log_prob else [{}, {"actor.fused_linear_log_prob": True}]
    if actor.micro_batch_tokens <= config.model.context_length:
        budgets = [{}]
    ways: list[Changes] = []
    if not actor.offload.optimizer_state:
        recomputes.append(recomputes[-1] | {"actor.offload.optimizer_state": True})
    for layout in [{}, *_layouts(config, hf)]:
        for budget, recompute, linear in itertools.product(budgets, recomputes, fused):
            ways.append({**layout, **budget, **recompute, **linear})
    if share_gpus(config):  # the server can be given less of it
        ways.insert(0, {"rollout.memory_fraction": round(config.rollout.memory_fraction / 2, 2)})
    return ways


def _layouts(config: Config, hf: HFModelConfig) -> Iterator[dict[str, Any]]:
    """Larger tensor- and pipeline-parallel sizes that divide the model, few GPUs first, tensor parallel first."""
    now = config.actor.layout
    tensors = [size for size in (1, 2, 4, 8) if now.tensor <= size <= _LARGEST_TENSOR]
    pipelines = range(now.pipeline, _LARGEST_PIPELINE + 1)
    for tensor, pipeline in sorted(itertools.product(tensors, pipelines), key=lambda one: (one[0] * one[1], -one[0])):
        if (tensor, pipeline) == (now.tensor, now.pipeline):
            continue
        sizes = {"tensor": tensor, "pipeline": pipeline, "sequence_parallel": tensor > 1}
        if not _possible(changed(config, {f"actor.layout.{name}": size for name, size in sizes.items()}), hf):
            continue
        yield {f"actor.layout.{name}": size for name, size in sizes.items() if size != getattr(now, name)}


def _server_ways(config: Config) -> list[Changes]:
    now = config.rollout
    ways: list[Changes] = [] if now.kv_cache_tokens is None else [{"rollout.kv_cache_tokens": None}]
    ways += [{"rollout.memory_fraction": 0.85}] if now.memory_fraction < 0.85 else []
    ways += [{"rollout.tensor_parallel": size} for size in (2, 4, 8) if size > now.tensor_parallel]
    if now.weight_sync == "distributed":
        ways += [{"rollout.sync_bucket_mb": size} for size in (1024, 256) if size < now.sync_bucket_mb]
        ways.append({"rollout.weight_sync": "disk"})
    return ways


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A division of the same GPUs."""

    layout: LayoutConfig
    servers: int
    plan: Plan
    chosen: bool
    """The config's own."""


def other_splits(
    config: Config, hf: HFModelConfig, constants: Calibration, plan: Plan, assumed: Assumptions
) -> list[Split]:
    """The same GPUs with another data-parallel size of the trainer, the rest to servers of the same size.

    Tried are half and twice the tensor- and pipeline-parallel sizes and data-parallel sizes that are powers of two;
    shown, at most `_ROWS_A_SIZE` of each number of trainer GPUs, those most like the config's own first. Empty where
    nothing can be divided: one GPU, or servers that someone else runs.
    """
    if plan.shared or config.rollout.urls:
        return []
    own, each = config.actor.layout, config.rollout.tensor_parallel
    total = own.world_size + plan.servers.gpus
    found: list[Split] = []
    for layout in _layouts_like(own):
        rows = sum(split.layout.world_size == layout.world_size for split in found)
        servers = (total - layout.world_size) // each
        if servers < 1 or rows == _ROWS_A_SIZE or len(found) == _ROWS:
            continue
        if layout == own:
            found.append(Split(layout=own, servers=config.rollout.servers, plan=plan, chosen=True))
            continue
        other = changed(config, {"actor": dataclasses.replace(config.actor, layout=layout), "rollout.servers": servers})
        if _possible(other, hf):
            other_plan = make_plan(other, hf, constants, assumed)
            found.append(Split(layout=layout, servers=servers, plan=other_plan, chosen=False))
    return sorted(found, key=lambda split: (split.layout.world_size, split.layout.tensor, split.layout.pipeline))


def _layouts_like(own: LayoutConfig) -> list[LayoutConfig]:
    """Candidates, the config's own first, then by likeness."""
    tensors = [size for size in {own.tensor, own.tensor // 2, own.tensor * 2} if 1 <= size <= _LARGEST_TENSOR]
    pipelines = {own.pipeline, max(1, own.pipeline // 2), own.pipeline * 2}
    found = [
        dataclasses.replace(
            own, tensor=tensor, pipeline=pipeline, data=data, sequence_parallel=own.sequence_parallel and tensor > 1
        )
        for tensor, pipeline, data in itertools.product(tensors, pipelines, {1, 2, 4, 8, 16, 32, own.data})
    ]
    return sorted(
        found,
        key=lambda one: (
            one != own,
            abs(math.log2(one.world_size / own.world_size)),
            one.tensor != own.tensor,
            one.pipeline != own.pipeline,
            one.tensor,
            one.pipeline,
        ),
    )


def _possible(config: Config, hf: HFModelConfig) -> bool:
    try:
        check_layout(hf, config.actor.layout)
    except ConfigError:
        return False
    return not list(contradictions(config))
