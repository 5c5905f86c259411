"""`megatron-dapo plan --trace`: what ranks of a config hold and call, found by running them without a GPU."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.plan.calibration import load_calibration
from megatron_dapo.plan.scenario import model_dimensions
from megatron_dapo.plan.trace.findings import Findings
from megatron_dapo.plan.trace.rank_processes import TraceError, telling_ranks, trace_ranks


def trace_command(path: Path, overrides: Sequence[str], *, ranks: str, layers: str, jobs: int) -> ExitCode:
    """Print peaks, calls and faults. FINISHED without a fault, FAILED with one, CONFIG if nothing could be traced."""
    try:
        config = load_config(path, overrides)
        layout = config.actor.layout
        if config.actor.fp8 != "none":
            raise ConfigError(f"actor.fp8 = {config.actor.fp8}: FP8 cannot be traced; give actor.fp8=none")
        if layout.context > 1:
            raise ConfigError(
                "actor.layout.context above 1 cannot be traced; give actor.layout.context=1 for the trace"
            )
        if ranks not in ("", "all") and not all(one.strip().isdecimal() for one in ranks.split(",")):
            raise ConfigError(f"--ranks {ranks}: give numbers with commas between them, or all")
        asked = range(layout.world_size) if ranks == "all" else sorted(set(map(int, filter(None, ranks.split(",")))))
        asked = asked or telling_ranks(layout)
        constants, hf = load_calibration(), model_dimensions(config.model.path)[0]
        print(f"tracing ranks {', '.join(map(str, asked))} of {layout.world_size}, about a minute each", flush=True)
        traces = trace_ranks(path, overrides, config, asked, layers=layers, jobs=jobs)
    except (ConfigError, TraceError) as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG
    findings = Findings(traces, config, hf, constants)
    print(f"\n{traces[0].kernels}\n\nPeak in GB and its deviation from the plan without framework and fragmentation:\n")
    print(findings.tables())
    print("\n".join(["", "Faults:", *findings.faults] if findings.faults else ["", "No fault was found."]))
    return ExitCode.FAILED if findings.faults else ExitCode.FINISHED
