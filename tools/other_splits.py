"""What `plan` says of the same GPUs, split otherwise between trainer and servers.

    python -m tools.other_splits CONFIG.yaml [section.key=value ...] [--calibration FILE]

A table of rollout, update and step seconds, tokens a second and GPU-hours; the config's own split has a star. Each
other one has the least `actor.recompute` that fits, where the config's is a number of layers.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.command_line import Overrides
from megatron_dapo.cli.main import main
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.plan.planner import Plan, least_recompute, make_plan, possible
from megatron_dapo.plan.scenario import Scenario, load_calibration, model_dimensions, share_gpus

LARGEST_TENSOR = 8
SPLITS = 12
SPLITS_OF_A_SIZE = 3

_COLUMNS = "trainer", "layout", "servers", "rollout s", "update s", "step s", "tokens/s/GPU", "GPU-hours"
_ROW = "{:13}{:21}{:>9}{:>13}{:>10}{:>8}{:>14}{:>11}"


def other_splits_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml")],
    overrides: Overrides = None,
    calibration: Annotated[Path | None, typer.Option(help="Constants, else the package's.")] = None,
) -> None:
    """Plan the same GPUs, split otherwise between trainer and servers."""
    loaded = load_config(config, overrides or [])
    plan = make_plan(Scenario(loaded, model_dimensions(loaded.model.path)[0], load_calibration(calibration)))
    if not plan.fits:
        raise ConfigError(f"{config} does not fit; megatron-dapo plan names what helps")
    splits = other_splits(plan)
    if len(splits) < 2:
        raise ConfigError(f"{config}: its GPUs cannot be split otherwise: shared, one alone, or servers of others")
    print(_ROW.format(*_COLUMNS))
    for split in splits:
        print(_row(split, own=split is plan))


def _row(split: Plan, *, own: bool) -> str:
    layout, step = split.case.config.actor.layout, split.step
    cut = f"TP {layout.tensor} PP {layout.pipeline} DP {layout.data}"
    cut += f" EP {layout.expert}" if split.case.hf.experts else ""
    what = f"{layout.world_size} GPUs{' *' if own else ''}", cut, split.case.config.rollout.servers
    if step is None:
        return _ROW.format(*what, "does not fit", "", "", "", "").rstrip()
    figures = step.rollout_s, step.update_s, step.seconds, step.tokens_per_s_per_gpu, split.gpu_hours
    return _ROW.format(*what, *(f"{figure:.0f}" for figure in figures))


def other_splits(plan: Plan) -> list[Plan]:
    """The same GPUs with another data-parallel size of the trainer, the rest to servers of the same size; `plan` itself
    among them.

    Tried are half and twice the tensor- and pipeline-parallel sizes and data-parallel sizes that are powers of two;
    shown, at most `SPLITS_OF_A_SIZE` of each number of trainer GPUs, those most like the config's own first. Empty
    where nothing can be divided: one GPU, or servers that someone else runs.
    """
    case = plan.case
    if share_gpus(case.config) or case.config.rollout.urls:
        return []
    own = case.config.actor.layout
    found: dict[LayoutConfig, Plan] = {}
    for layout in _layouts_like(own):
        rows = sum(other.world_size == layout.world_size for other in found)
        servers = (case.gpus - layout.world_size) // case.config.rollout.tensor_parallel
        if servers < 1 or rows == SPLITS_OF_A_SIZE or len(found) == SPLITS:
            continue
        actor = dataclasses.replace(case.config.actor, layout=layout)
        other = case.changed({"actor": actor, "rollout.servers": servers})
        if layout == own:
            found[layout] = plan
        elif possible(other.changed({"actor.recompute": "none"})):
            if isinstance(actor.recompute, int):
                other = other.changed({"actor.recompute": least_recompute(other)})
            found[layout] = make_plan(other)
    return [found[one] for one in sorted(found, key=lambda one: (one.world_size, one.tensor, one.pipeline, one.expert))]


def _layouts_like(own: LayoutConfig) -> list[LayoutConfig]:
    """Candidates, the config's own first, then by likeness."""
    tensors = [size for size in {own.tensor, own.tensor // 2, own.tensor * 2} if 1 <= size <= LARGEST_TENSOR]
    pipelines = {own.pipeline, max(1, own.pipeline // 2), own.pipeline * 2}
    found = [
        dataclasses.replace(
            own,
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            expert=expert,
            sequence_parallel=tensor > 1 and (own.sequence_parallel or own.tensor == 1),
        )
        for tensor, pipeline, data, expert in itertools.product(
            tensors, pipelines, {1, 2, 4, 8, 16, 32, own.data}, {own.expert, max(1, own.expert // 2), own.expert * 2}
        )
    ]

    def unlikeness(one: LayoutConfig) -> tuple[object, ...]:
        distance = abs(math.log2(one.world_size / own.world_size))
        others = (one.expert != own.expert, one.tensor != own.tensor, one.pipeline != own.pipeline)
        return (one != own, distance, *others, one.tensor, one.pipeline, one.expert)

    return sorted(found, key=unlikeness)


if __name__ == "__main__":
    main(lambda: typer.run(other_splits_command))
