"""The ladder: `python -m examples.ablation`, from the repository's root. Stop it any time; the same command goes on."""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from examples.ablation.cost import estimate
from examples.ablation.rungs import RUNGS, Place, Planned, plan
from examples.ablation.runs import LadderStopped, State, execute, make_inputs, state_of
from megatron_dapo.config import ConfigError
from megatron_dapo.monitor.console import duration

SEEDS = 5


def main(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value ...]", help="Override keys in every run.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of data, bases, runs and report.")] = Path("runs/ablation"),
    seeds: Annotated[str, typer.Option(help="How many (5: 0 to 4), or which: 0,2,7.")] = str(SEEDS),
    rungs: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(RUNGS)}. Empty: all.")] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Rollout steps of a run; else as ladder.yaml.")] = None,
    base_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of a base's teaching; else its recipe's.")
    ] = None,
    niceness: Annotated[int, typer.Option(min=0, max=19, help="How far other processes go first, at least.")] = 10,
    show_plan: Annotated[
        bool, typer.Option("--plan", help="Print what would be run and what it costs, and end.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Only write the report of what is done.")] = False,
) -> None:
    """Run every rung at every seed, one after another, and write report.html, results.md and curves.png."""
    try:
        runs = plan(
            Place(folder=out),
            rungs.split(",") if rungs else list(RUNGS),
            _seeds(seeds),
            steps=steps,
            more=overrides or [],
        )
        states = [state_of(run) for run in runs]
    except (ValueError, ConfigError, LadderStopped) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    _print_plan(runs, states)
    if show_plan:
        return
    if not report:
        os.nice(max(0, niceness - os.nice(0)))
        try:
            _run_all(Place(folder=out), runs, base_steps)
        except LadderStopped as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None
    _write_report(out, runs)


def _seeds(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    return list(range(numbers[0])) if "," not in text else numbers


def _print_plan(runs: list[Planned], states: list[State]) -> None:
    for seed in dict.fromkeys(run.seed for run in runs):
        of_seed = Counter(state for run, state in zip(runs, states, strict=True) if run.seed == seed)
        print(f"seed {seed}: " + ", ".join(f"{count} {state}" for state, count in of_seed.items()))
    print(_remaining(runs), flush=True)


def _run_all(place: Place, runs: list[Planned], base_steps: int | None) -> None:
    for number, run in enumerate(runs, start=1):
        if state_of(run) in (State.FINISHED, State.FAILED):
            continue
        make_inputs(place, run.seed, base_steps=base_steps)
        print(f"{number} of {len(runs)}: {run.name}: {run.rung.label}", flush=True)
        print(f"  {execute(run)}; {_remaining(runs)}", flush=True)


def _remaining(runs: list[Planned]) -> str:
    """How many runs are left, and for how long by those that are done."""
    states = [state_of(run) for run in runs]
    left = sum(state in (State.NEW, State.HALF) for state in states)
    found = estimate(runs, states)
    if found is None:
        return f"{left} runs left; the first one measures what they cost here"
    return f"{left} runs left, about {duration(found.seconds)} as {found.measured} done here took"


def _write_report(out: Path, runs: list[Planned]) -> None:
    from examples.ablation.report import write_report
    from examples.ablation.results import read_outcomes

    outcomes = read_outcomes(runs)
    if not outcomes:
        print("no run is done yet: nothing to report")
        return
    for file in write_report(out, outcomes):
        print(file)


if __name__ == "__main__":
    typer.run(main)
