"""`megatron-dapo replay`: does a rollout step come out the same when it is computed again?"""

from pathlib import Path

from megatron_dapo.cli.comparison import comparison_command
from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config


def replay_command(run: Path, step: int, tolerance: float, deadline_s: float) -> ExitCode:
    """Print recorded and recomputed numbers; INEXACT where one differs by more than `tolerance`, relatively."""
    return comparison_command(lambda: _replay(run, step, tolerance, deadline_s))


def _replay(run: Path, step: int, tolerance: float, deadline_s: float) -> bool:
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: no config.yaml there; give the directory of a run")
    from megatron_dapo.diagnostics.step_replay import replay

    values = replay(run.resolve(), load_config(run / "config.yaml"), step, deadline_s=deadline_s)
    print(f"{'':36} {'recorded':>24} {'now':>24} {'difference':>12}")
    for each in values:
        print(f"{each.name:36} {each.recorded:>24.17g} {each.now:>24.17g} {each.difference:>12.1e}")
    if any(not each.difference <= tolerance for each in values):
        print(f"step {step} does NOT come out the same: a difference is above {tolerance:g}")
        return False
    print(f"step {step} comes out the same")
    return True
