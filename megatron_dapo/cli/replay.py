"""`megatron-dapo replay`: does a rollout step come out the same when it is computed again?"""

from pathlib import Path
from typing import Annotated

import typer

from megatron_dapo.cli.command_line import comparison_command, config_of


@comparison_command
def replay(
    run: Annotated[Path, typer.Argument(help="Directory of a run that was made with run.save_batches=true.")],
    step: Annotated[int, typer.Option(min=1, help="Rollout step.")],
    tolerance: Annotated[float, typer.Option(min=0, help="Largest relative difference; 0 on the CPU.")] = 0.0,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that each pass may take.")] = 1800.0,
) -> bool:
    """Compute one rollout step of a run again, from its batch and the checkpoint before it, and compare."""
    config = config_of(run)
    from megatron_dapo.diagnostics.step_replay import replay_step

    values, same = replay_step(run.resolve(), config, step, deadline_s=deadline), True
    print(f"{'':36} {'recorded':>24} {'now':>24} {'difference':>12}")
    for name, (recorded, now) in values.items():
        difference = abs(now - recorded) / (abs(recorded) or 1.0)
        print(f"{name:36} {recorded:>24.17g} {now:>24.17g} {difference:>12.1e}")
        same = same and difference <= tolerance
    if not same:
        print(f"step {step} does NOT come out the same: a difference is above {tolerance:g}")
        return False
    print(f"step {step} comes out the same")
    return True
