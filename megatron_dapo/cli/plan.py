"""`megatron-dapo plan`: memory, seconds and GPU-hours of a config, before a GPU is asked for."""

from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.command_line import ConfigFile, Overrides
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import load_config
from megatron_dapo.monitor.console import text_page


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu_memory: Annotated[float | None, typer.Option(min=1, help="GB (10^9 bytes) of a GPU; 80 if not given.")] = None,
    mean_length: Annotated[float | None, typer.Option(min=1, help="Tokens of a response, uncut, on average.")] = None,
    sigma: Annotated[float | None, typer.Option(min=0, help="Deviation of the logarithm of the length.")] = None,
    pass_rate: Annotated[float | None, typer.Option(min=0.01, max=0.99, help="Share of groups kept.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Constants of your hardware.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: bytes, seconds, tokens.")] = False,
) -> None:
    """Say, without a GPU, whether a config fits, how long its phases take and what the run costs."""
    from megatron_dapo.plan.planner import least_recompute, make_plan
    from megatron_dapo.plan.rank_state import active_parameters, model_parameters
    from megatron_dapo.plan.scenario import Scenario, load_calibration, model_dimensions, share_gpus

    loaded, constants = load_config(config, overrides or []), load_calibration(calibration)
    hf, source = model_dimensions(loaded.model.path)
    assumed = {"gpu_memory": gpu_memory and gpu_memory * 1e9, "mean_response": mean_length, "response_sigma": sigma}
    assumed["pass_rate"] = pass_rate
    constants = replace(constants, **{name: value for name, value in assumed.items() if value is not None})
    found = make_plan(Scenario(loaded, hf, constants))
    size = {"source": source, "parameters": model_parameters(hf), "active": active_parameters(hf)}
    if json:
        print(dumps({"model": size} | found.tree(), indent=2))
    else:
        named = {"plan": found, "case": found.case, "step": found.step, "shared": share_gpus(loaded)}
        print(text_page("megatron_dapo.plan", "plan.txt.j2", least_recompute=least_recompute, **named, **size))
    raise typer.Exit(ExitCode.CONFIG if found.misfits else ExitCode.FINISHED)
