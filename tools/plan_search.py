"""The fastest ways to use the GPUs that a config has, by the plan.

    python -m tools.plan_search CONFIG.yaml [section.key=value ...] [--any-mode] [--keep KEY] [--json]

Varied are the layout, `actor.recompute` (the least that fits), `actor.micro_batch_tokens`, optimizer state in host
memory, which share of the GPUs trains, and the servers' tensor-parallel size, with as many responses at once as their
KV cache has room for. What splits a layer or a server is a power of two of at most a node, so trainer and servers find
places whatever the share is (`cluster.placement`).

Rollouts depend on the servers alone and are simulated once for each. Trainers come in the order of what they take at
least: without recompute, estimated from a few parts of a step. The search ends where that is above what was found.
"""

import itertools
import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from megatron_dapo.actor.model.hf_config import block_problem, check_actor
from megatron_dapo.cli.command_line import Overrides
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.cli.main import main
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.config.load import flatten_config
from megatron_dapo.config.root import contradictions
from megatron_dapo.monitor.console import text_page
from megatron_dapo.plan.memory import server_memory, trainer_memory
from megatron_dapo.plan.planner import (
    SPARE,
    Plan,
    find_misfits,
    least_recompute,
    make_plan,
    trainer_room,
)
from megatron_dapo.plan.rollout import RolloutStep
from megatron_dapo.plan.scenario import Changes, Scenario, load_calibration, model_dimensions
from megatron_dapo.plan.step_plan import plan_step, rollouts
from megatron_dapo.plan.trainer_time import forward_flops, slow_flops
from rollout.config import RolloutConfig

_APART = {"actor.offload.between_phases": "none"}
MODES: dict[str, Changes] = {
    "sync": {"run.mode": "sync"} | _APART,
    "colocated": {"run.mode": "colocated", "actor.offload.between_phases": "all", "rollout.weight_sync": "auto"},
    "async": {"run.mode": "async", "algorithm.dynamic_sampling.max_staleness": 2} | _APART,
}
"""With what else they need."""

_LARGEST_PIPELINE = 16
_MOST_GPUS = 1024

_EVERY = 8
"""Of so many parts of a step one is calculated in an estimate."""

_MARGIN = 1.04
"""A trainer is left out if it takes so much more at least."""

_EQUAL = 0.0025
"""What a step may take more than the fastest and is no slower: the plan's own error is larger."""

_BUDGETS = (1.0, 1.5, 2.0, 4.0)
"""`actor.micro_batch_tokens`, in longest sequences."""

_GRAPHS = 256
"""Responses that SGLang decodes by CUDA graphs on a GPU of 80 GB; from tensor-parallel size 4 on twice as many."""


def plan_search_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml")],
    overrides: Overrides = None,
    any_mode: Annotated[bool, typer.Option("--any-mode", help="Search other values of run.mode too.")] = False,
    keep: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Search without a change of this key.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(min=1, help="GB (10^9 bytes) of a GPU; 80 if not given.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Constants, else the package's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: bytes, seconds, tokens.")] = False,
) -> None:
    """Print the fastest plans for the config's GPUs, and the keys that make the first of it. Of those within 0.25% of
    the fastest the one with most memory to spare comes first."""
    loaded = load_config(config, overrides or [])
    if unknown := sorted(set(keep or []) - flatten_config(loaded).keys()):
        raise ConfigError(f"--keep {unknown[0]}: no key of a config; megatron-dapo check CONFIG.yaml prints all")
    constants = load_calibration(calibration)
    constants = replace(constants, gpu_memory=gpu_memory * 1e9 if gpu_memory else constants.gpu_memory)
    case = Scenario(loaded, model_dimensions(loaded.model.path)[0], constants)
    modes, gpus = tuple(MODES) if any_mode else (), case.gpus
    while not (plans := search(case, modes, keep=keep or [], gpus=gpus)) and 2 * gpus <= _MOST_GPUS:
        gpus *= 2
    found = [{"set": _changes(case, plan), **_figures(plan)} for plan in plans]
    page = text_page("tools", "plan_search.txt.j2", case=case, gpus=gpus, plans=plans, found=found, json=json.dumps)
    print(json.dumps({"gpus": gpus, "found": found}, indent=2) if as_json else page)
    raise typer.Exit(ExitCode.FINISHED if plans else ExitCode.CONFIG)


def _changes(case: Scenario, plan: Plan) -> dict[str, Any]:
    """Keys by which a plan's config differs."""
    old, new = flatten_config(case.config), flatten_config(plan.case.config)
    return {key: value for key, value in new.items() if old.get(key) != value}


def _figures(plan: Plan) -> dict[str, Any]:
    """Seconds and bytes of what a search found; parts of all updates of a step."""
    step = plan.step
    assert step is not None
    update = step.update
    parts = {"compute": update.compute_s - update.recompute_s - update.padding_s, "recompute": update.recompute_s}
    parts |= {"padding": update.padding_s, "bubble": update.bubble_s, "exposed_communication": update.exposed_s}
    figures = {"seconds": step.seconds, "tokens_per_s": step.tokens_per_s_per_gpu * step.gpus, "mfu": step.mfu}
    figures |= {"headroom": headroom(plan.case), "rollout_s": step.rollout_s, "log_prob_s": step.log_prob_s}
    return figures | {"update_s": {name: step.optimizer_steps * seconds for name, seconds in parts.items()}}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Servers:
    rollout: RolloutConfig
    filled: list[RolloutStep]

    @property
    def seconds(self) -> float:
        return fmean(one.seconds for one in self.filled)


def search(
    case: Scenario, modes: Sequence[str] = (), *, keep: Collection[str] = (), best: int = 10, gpus: int = 0
) -> list[Plan]:
    """The `best` plans, the fastest first, of equals (`_EQUAL`) the one that leaves most memory, in GB; with less
    than `SPARE` of a GPU to spare only where nothing leaves that. Empty: nothing fits.

    Args:
        modes: of `MODES`; none: the config's own.
        keep: keys that stay as they are, of those that are varied.
        gpus: how many there are; 0: as many as `case` has.
    """
    if modes and case.config.rollout.weight_sync == "tensor":  # for one of them alone
        case = case.changed({"rollout.weight_sync": "auto"})
    starts = [case.changed(MODES[mode]) for mode in modes] or [case]
    for spare in (SPARE * case.constants.gpu_memory, 0.0):
        if found := [one for start in starts for one in _fastest(start, gpus or case.gpus, spare, keep, best)]:
            plans = sorted((make_plan(one, filled=servers.filled) for one, servers in found), key=_seconds)
            equal = [plan for plan in plans if _seconds(plan) <= (1 + _EQUAL) * _seconds(plans[0])]
            return [*sorted(equal, key=lambda plan: -round(headroom(plan.case) / 1e9)), *plans[len(equal) :]][:best]
    return []


def _seconds(plan: Plan) -> float:
    return plan.step.seconds if plan.step else math.inf


def _fastest(
    start: Scenario, gpus: int, spare: float, keep: Collection[str], best: int
) -> list[tuple[Scenario, _Servers]]:
    """In one mode; a few more than `best`, by estimate."""
    servers: dict[int, _Servers | None] = {}
    waiting: list[tuple[float, int, bool, Scenario, _Servers]] = []
    for layout in _layouts(start, gpus):
        case = start.changed({"actor.layout": layout, "actor.offload.optimizer_state": False})
        case = case.changed({"actor.recompute": "none"})
        same = _same(start, case, keep, "actor.layout.")
        if not same or not any(headroom(one) >= spare for one in _leanest(case)):
            continue
        if layout.world_size not in servers:
            servers[layout.world_size] = _best_servers(case, gpus, keep)
        if (own := servers[layout.world_size]) is not None:
            case = case.changed({"rollout": own.rollout})
            heappush(waiting, (_floor(case, own), len(waiting), False, case, own))
    found: list[tuple[float, Scenario, _Servers]] = []
    while waiting:
        least, number, estimated, case, own = heappop(waiting)
        if len(found) >= best and least > _MARGIN * found[best - 1][0]:
            break
        if not estimated:
            least = min(_estimate(one, own) for one in _budgeted(case, _BUDGETS[::2]))
            heappush(waiting, (least, number, True, case, own))
            continue
        ways = [(_estimate(one, own), one, own) for one in _ways(case, spare) if _same(start, one, keep, "actor.")]
        found = sorted([*found, *sorted(ways, key=itemgetter(0))[:1]], key=itemgetter(0))
    return [(one, own) for _, one, own in found[: best + 2]]


def _layouts(case: Scenario, gpus: int) -> Iterator[LayoutConfig]:
    """All by which the model can be cut; on all GPUs where servers share them, else on fewer."""
    node, layers, own = int(case.constants.gpus_per_node), case.hf.num_layers, case.config.actor.layout.world_size
    # Of many GPUs every fourth split, or fewer: their figures differ little.
    shares = range(max(1, gpus // 32), gpus, max(1, gpus // 32))
    worlds = [gpus] if _shared(case, gpus) else [own] if case.config.rollout.urls else shares
    pipelines = [size for size in range(1, _LARGEST_PIPELINE + 1) if layers % size == 0]
    experts = _powers(case.hf.experts.count) if case.hf.experts else [1]
    for tensor, pipeline, context in itertools.product(_powers(node), pipelines, _powers(node)):
        chunks = [size for size in (2, 4, 8) if pipeline > 1 and layers // pipeline % size == 0]
        parts = _powers(tensor) if case.hf.experts else [1]
        for world, virtual, expert, part in itertools.product(worlds, (None, *chunks), experts, parts):
            split = tensor * context * pipeline
            # Experts of a group on the trainer's last node, which may share it with servers, are all there.
            if world % split or world // pipeline % (expert * part) or world % node % min(node, expert * part):
                continue
            cut: dict[str, Any] = {
                "tensor": tensor,
                "pipeline": pipeline,
                "virtual_pipeline": virtual,
                "context": context,
            }
            cut |= {"data": world // split, "expert": expert, "expert_tensor": part}
            one = LayoutConfig(**cut, sequence_parallel=tensor > 1)
            if possible(case.changed({"actor.layout": one})):
                yield one


def headroom(case: Scenario) -> float:
    """Bytes of a GPU that the trainer leaves free where it needs most; negative: it does not fit."""
    room = trainer_room(case)
    return min(room[phase] - peak for rank in trainer_memory(case) for phase, peak in rank.peaks.items())


def possible(case: Scenario) -> bool:
    """Whether the model can be cut so, and no keys contradict each other."""
    try:
        check_actor(case.hf, case.config.actor)
    except ConfigError:
        return False
    return not list(contradictions(case.config))


def _shared(case: Scenario, gpus: int) -> bool:
    """`share_gpus` of everything that is searched on `gpus` GPUs."""
    return case.config.run.mode == "colocated" or gpus == 1


def _powers(largest: int) -> list[int]:
    """Of two, up to `largest`."""
    return [2**power for power in range(largest.bit_length())]


def _same(start: Scenario, one: Scenario, keep: Collection[str], section: str) -> bool:
    """Whether keys of `keep` in this section are as they were."""
    values = (attrgetter(key) for key in keep if key.startswith(section))
    return all(value(start.config) == value(one.config) for value in values)


def _best_servers(case: Scenario, gpus: int, keep: Collection[str]) -> _Servers | None:
    """Those that fill a batch soonest on the GPUs that the trainer leaves; None: the model does not fit there."""
    found = []
    rest = gpus - (0 if _shared(case, gpus) else case.config.actor.layout.world_size)
    for size in _powers(int(case.constants.gpus_per_node)):
        quantized = case.config.rollout.quantization != "none"
        if rest % size or case.hf.num_attention_heads % size or (quantized and block_problem(case.hf, size)):
            continue
        sizes: dict[str, int | None] = {"rollout.tensor_parallel": size, "rollout.servers": rest // size}
        sizes |= {"rollout.max_running_requests": _GRAPHS * (2 if size >= 4 else 1), "rollout.kv_cache_tokens": None}
        one = case if case.config.rollout.urls else case.changed(sizes)
        misfits = [misfit for misfit in find_misfits(one) if misfit.part == "server"]
        if not misfits and _same(case, one, keep, "rollout."):
            found.append(_Servers(rollout=one.config.rollout, filled=rollouts(one, server_memory(one))))
    hidden = case.config.run.mode == "async"
    return min(found, key=lambda one: sum(each.seconds - hidden * each.tail_s for each in one.filled), default=None)


def _leanest(case: Scenario) -> Iterator[Scenario]:
    """What takes least memory in a layout, one of them."""
    [one] = _budgeted(case, _BUDGETS[:1])
    for amount in ("full", "none"):
        yield one.changed({"actor.recompute": amount, "actor.offload.optimizer_state": _offloads(case)[-1]})


def _offloads(case: Scenario) -> tuple[bool, ...]:
    """Of the optimizer's state, which may be in host memory already."""
    return (False,) if case.config.actor.optimizer.on_cpu else (False, True)


def _budgeted(case: Scenario, budgets: Sequence[float]) -> Iterator[Scenario]:
    """With `actor.micro_batch_tokens` so many times the longest sequence."""
    longest = -(-case.config.model.context_length // case.config.actor.layout.context)
    for times in budgets:
        yield case.changed({"actor.micro_batch_tokens": int(times * longest)})


def _ways(case: Scenario, spare: float) -> Iterator[Scenario]:
    """That leave `spare` bytes of a GPU. State in host memory costs only where nothing is computed again."""
    for budgeted in _budgeted(case, _BUDGETS):
        for offload in _offloads(case):
            one = budgeted.changed({"actor.offload.optimizer_state": offload})
            one = one.changed({"actor.recompute": least_recompute(one)})
            if headroom(one) >= spare:
                yield one
                if one.config.actor.recompute == "none":
                    break


def _floor(case: Scenario, servers: _Servers) -> float:
    """Seconds of a step that no trainer of this layout falls below: rollouts, and the updates' arithmetic alone."""
    lengths, layout, constants = servers.filled[0].lengths, case.config.actor.layout, case.constants
    slow = slow_flops(case.hf, layout, constants) * lengths.sum()
    flops = 3 * (forward_flops(case.hf, lengths).sum() + slow)
    update_s = float(flops / (layout.world_size * constants.peak_flops * constants.train_efficiency))
    if case.config.run.mode == "async":
        return update_s
    return servers.seconds + update_s


def _estimate(case: Scenario, servers: _Servers) -> float:
    """Seconds of a step, the trainer's from the first rollout alone."""
    first, hidden = servers.filled[:1], case.config.run.mode == "async"
    seconds = plan_step(case, first, every=_EVERY).seconds
    return seconds if hidden else seconds + servers.seconds - first[0].seconds


if __name__ == "__main__":
    main(lambda: typer.run(plan_search_command))
