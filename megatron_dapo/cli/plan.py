"""`megatron-dapo plan`: memory, seconds and GPU-hours of a config, before a GPU is asked for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import load_config
from megatron_dapo.monitor.console import text_page
from megatron_dapo.plan.memory import PHASES
from megatron_dapo.plan.planner import Plan, make_plan
from megatron_dapo.plan.rank_state import active_parameters, model_parameters
from megatron_dapo.plan.scenario import Scenario, load_calibration, model_dimensions, share_gpus


def plan_command(
    path: Path, overrides: Sequence[str], calibration: Path | None, *, as_json: bool, **assumed: float | None
) -> ExitCode:
    """Print the plan. FINISHED if everything fits, else CONFIG.

    Args:
        assumed: constants that take another value than the calibration's, where one is given.

    Raises:
        ConfigError: a config or a calibration that is none, or a layout that does not divide the model.
    """
    config, constants = load_config(path, overrides), load_calibration(calibration)
    hf, source = model_dimensions(config.model.path)
    constants = replace(constants, **{name: value for name, value in assumed.items() if value is not None})
    plan = make_plan(Scenario(config, hf, constants))
    size = {"source": source, "parameters": model_parameters(hf), "active": active_parameters(hf)}
    if as_json:
        print(json.dumps(_tree(size, plan), indent=2))
    else:
        named = {"plan": plan, "case": plan.case, "step": plan.step, "shared": share_gpus(config), "phases": PHASES}
        print(text_page("megatron_dapo.plan", "plan.txt.j2", json=json.dumps, **named, **size))
    return ExitCode.FINISHED if plan.fits else ExitCode.CONFIG


def _tree(model: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
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
        "workload": asdict(plan.case.workload),
        "step": plan.step and asdict(plan.step) | derived | {"gpu_hours": plan.gpu_hours},
    }
