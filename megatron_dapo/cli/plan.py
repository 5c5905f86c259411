"""`megatron-dapo plan`: memory, seconds and GPU-hours of a config, before a GPU is asked for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.config_diff import flatten_config
from megatron_dapo.monitor.console import text_page
from megatron_dapo.plan.memory import PHASES
from megatron_dapo.plan.planner import Plan, headroom, make_plan, remedies
from megatron_dapo.plan.rank_state import active_parameters, model_parameters
from megatron_dapo.plan.scenario import Changes, Scenario, load_calibration, model_dimensions, share_gpus
from megatron_dapo.plan.search import search


def plan_command(case: Scenario, source: str, *, as_json: bool) -> ExitCode:
    """Print the plan. FINISHED if everything fits, else CONFIG. `source`: where the model's sizes come from.

    Raises:
        ConfigError: a layout that does not divide the model.
    """
    plan = make_plan(case)
    ways = [] if plan.fits else remedies(plan.case)
    size = {"source": source, "parameters": model_parameters(case.hf), "active": active_parameters(case.hf)}
    print(json.dumps(_tree(size, plan, ways), indent=2) if as_json else _page(size, plan, ways))
    return ExitCode.FINISHED if plan.fits else ExitCode.CONFIG


def search_command(case: Scenario, modes: Sequence[str], keep: Sequence[str], *, as_json: bool) -> ExitCode:
    """Print the fastest plans for the config's GPUs, and the keys that make the first of it. CONFIG if nothing fits.

    Raises:
        ConfigError: `keep` has what is no key.
    """
    if unknown := sorted(set(keep) - flatten_config(case.config).keys()):
        raise ConfigError(f"--keep {unknown[0]}: no key of a config; megatron-dapo check CONFIG.yaml prints all")
    plans = search(case, modes, keep=keep)
    found = [{"set": _changes(case, plan), **_figures(plan)} for plan in plans]
    page = text_page("megatron_dapo.plan", "search.txt.j2", case=case, plans=plans, found=found, json=json.dumps)
    print(json.dumps({"gpus": case.gpus, "found": found}, indent=2) if as_json else page)
    return ExitCode.FINISHED if plans else ExitCode.CONFIG


def planned(
    path: Path, overrides: Sequence[str], calibration: Path | None, **assumed: float | None
) -> tuple[Scenario, str]:
    """What is to be planned, and where the model's sizes come from.

    Args:
        assumed: constants that take another value than the calibration's, where one is given.

    Raises:
        ConfigError: a config or a calibration that is none.
    """
    config, constants = load_config(path, overrides), load_calibration(calibration)
    hf, source = model_dimensions(config.model.path)
    constants = replace(constants, **{name: value for name, value in assumed.items() if value is not None})
    return Scenario(config, hf, constants), source


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


def _tree(model: Mapping[str, Any], plan: Plan, ways: Sequence[Changes]) -> dict[str, Any]:
    """The plan as JSON holds it: bytes, seconds, tokens."""
    derived = {name: getattr(plan.step, name, None) for name in ("seconds", "tokens_per_s_per_gpu")}
    return {
        "model": model,
        "fits": plan.fits,
        "gpu_memory": plan.case.constants.gpu_memory,
        "trainer": [asdict(rank) | {"peaks": rank.peaks} for rank in plan.ranks],
        "server": plan.server and asdict(plan.server),
        "host": plan.host,
        "misfits": [asdict(misfit) for misfit in plan.misfits],
        "remedies": [dict(way) for way in ways],
        "workload": asdict(plan.case.workload),
        "step": plan.step and asdict(plan.step) | derived | {"gpu_hours": plan.gpu_hours},
    }


def _page(model: Mapping[str, Any], plan: Plan, ways: Sequence[Changes]) -> str:
    """templates/plan.txt.j2 of it."""
    named = {"plan": plan, "ways": ways, "case": plan.case, "step": plan.step, "shared": share_gpus(plan.case.config)}
    return text_page("megatron_dapo.plan", "plan.txt.j2", phases=PHASES, json=json.dumps, **named, **model)
