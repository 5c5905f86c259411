"""`megatron-dapo replay`: does a rollout step come out the same when it is computed again?"""

import sys
from pathlib import Path
from typing import Literal

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.config import ConfigError, load_config


def replay_command(run: Path, step: int, tolerance: float, deadline_s: float) -> ExitCode:
    """Print recorded and recomputed numbers; INEXACT where one differs by more than `tolerance`, relatively."""
    if not (run / "config.yaml").is_file():
        print(f"{run}: no config.yaml there; give the directory of a run", file=sys.stderr)
        return ExitCode.CONFIG
    import torch

    from megatron_dapo.actor.ranks import RankError, RankTimeout
    from megatron_dapo.diagnostics.step_replay import replay
    from megatron_dapo.monitor.writer import MetricsError
    from megatron_dapo.storage.group_files import GroupFileError

    try:
        config = load_config(run / "config.yaml")
        cuda = config.actor.device != "cpu" and torch.cuda.is_available()
        device: Literal["cpu", "cuda"] = "cuda" if cuda else "cpu"
        compared = replay(run.resolve(), config, step, device=device, deadline_s=deadline_s)
    except (ConfigError, GroupFileError, MetricsError) as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG
    except RankTimeout as error:
        print(error, file=sys.stderr)
        return ExitCode.STALLED
    except RankError as error:
        print(error, file=sys.stderr)
        return ExitCode.TRAINER
    print(f"{'':36} {'recorded':>24} {'now':>24} {'difference':>12}")
    for each in compared:
        print(f"{each.name:36} {each.recorded:>24.17g} {each.now:>24.17g} {each.difference:>12.1e}")
    if any(not each.difference <= tolerance for each in compared):
        print(f"step {step} does NOT come out the same: a difference is above {tolerance:g}")
        return ExitCode.INEXACT
    print(f"step {step} comes out the same")
    return ExitCode.FINISHED
