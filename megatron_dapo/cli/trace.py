"""`megatron-dapo plan --trace`: what ranks of a config hold and call, found by running them without a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.plan.calibration import load_calibration
from megatron_dapo.plan.scenario import model_dimensions
from megatron_dapo.plan.trace.findings import Findings
from megatron_dapo.plan.trace.rank_processes import chosen_ranks, trace_ranks


def trace_command(
    path: Path, overrides: Sequence[str], *, ranks: str, layers: Literal["te", "local"], jobs: int
) -> ExitCode:
    """Print peaks, calls and faults. FINISHED without a fault, FAILED with one.

    Raises:
        ConfigError: nothing can be traced.
    """
    config, constants = load_config(path, overrides), load_calibration()
    for key, value, possible in (
        ("actor.fp8", config.actor.fp8, "none"),
        ("actor.layout.context", config.actor.layout.context, 1),
    ):
        if value != possible:
            raise ConfigError(f"{key} = {value}: cannot be traced; give {key}={possible} for the trace")
    asked, hf = chosen_ranks(ranks, config.actor.layout), model_dimensions(config.model.path)[0]
    print(
        f"tracing ranks {', '.join(map(str, asked))} of {config.actor.layout.world_size}, about a minute each",
        flush=True,
    )
    findings = Findings(trace_ranks(path, overrides, asked, layers=layers, jobs=jobs), config, hf, constants)
    kernels = findings.traces[0].kernels
    print(f"\n{kernels}\n\nPeak in GB and its deviation from the plan without framework and fragmentation:\n")
    print(findings.tables())
    print("\n".join(["", "Faults:", *findings.faults] if findings.faults else ["", "No fault was found."]))
    return ExitCode.FAILED if findings.faults else ExitCode.FINISHED
