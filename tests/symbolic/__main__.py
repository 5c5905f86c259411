"""`python -m tests.symbolic CONFIG.yaml [KEY=VALUE ...]`: peaks, calls and faults of a config's ranks; exit code 1 with
a fault. It needs a CUDA build of torch with its headers, gcc and TransformerEngine's Python, and no GPU."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.plan.scenario import load_calibration, model_dimensions
from tests.symbolic import rank_processes
from tests.symbolic.findings import Findings
from tools.arguments import positive_count


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Trace what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.symbolic", description="Trace ranks without a GPU.")
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--ranks", default="", help="0,8,9 or all; else one a stage, and others")
    parser.add_argument("--layers", choices=["te", "local"], default="te", help="TransformerEngine's, or our own")
    parser.add_argument("--jobs", type=positive_count, default=2, help="ranks at once (2)")
    given = parser.parse_intermixed_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the ranks end too, and their folder is removed
    try:
        return report(given.config, given.overrides, ranks=given.ranks, layers=given.layers, jobs=given.jobs)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG


def report(path: Path, overrides: Sequence[str], *, ranks: str, layers: Literal["te", "local"], jobs: int) -> ExitCode:
    """Print peaks, calls and faults. FINISHED without a fault, FAILED with one.

    Raises:
        ConfigError: nothing can be traced.
    """
    config = load_config(path, overrides)
    for key, value, possible in (
        ("actor.fp8", config.actor.fp8, "none"),
        ("actor.layout.context", config.actor.layout.context, 1),
    ):
        if value != possible:
            raise ConfigError(f"{key} = {value}: cannot be traced; give {key}={possible} for the trace")
    hf = model_dimensions(config.model.path)[0]
    if hf.experts is not None:
        raise ConfigError(f"{config.model.path}: a mixture of experts cannot be traced: tokens decide its shapes")
    asked = rank_processes.chosen_ranks(ranks, config.actor.layout)
    shown = ", ".join(map(str, asked))
    print(f"tracing ranks {shown} of {config.actor.layout.world_size}, about a minute each", flush=True)
    traces = rank_processes.trace_ranks(path, overrides, asked, layers=layers, jobs=jobs)
    findings = Findings(traces, config, hf, load_calibration())
    print(f"\n{traces[0].kernels}\n\nPeak in GB and its deviation from the plan without framework and fragmentation:\n")
    print(findings.tables())
    print("\n".join(["", "Faults:", *findings.faults] if findings.faults else ["", "No fault was found."]))
    return ExitCode.FAILED if findings.faults else ExitCode.FINISHED


if __name__ == "__main__":
    sys.exit(main())
