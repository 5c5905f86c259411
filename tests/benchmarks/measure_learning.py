"""Training seconds until held-out sampled accuracy reaches a goal: this system against TRL, in turns, in one run.

python -m tests.benchmarks.measure_learning examples/quickstart/dapo.yaml --peer-python trl-venv/bin/python

TRL runs from an environment of its own (tests/benchmarks/trl_requirements.txt). Both train on the config's data, model
and hyperparameters, and evaluate after every `--every` rollout steps, which no clock counts. The goal is reached
between two evaluations: the second is found on the straight line between them. What TRL does not have is in
tests/benchmarks/train_trl.py. Round r trains both with seed r. With `--keep FILE` the rounds are appended there, as
JSON lines, and those that it holds already are not run again: the tables are of them all.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Point = tuple[int, float, float]
"""Rollout step, training seconds, accuracy."""

OURS = ("rollout", "reward", "logprob", "update", "weight_sync", "checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """One training."""

    curve: list[Point]
    phases: dict[str, float]
    """Seconds by phase, over the whole training; `training` is their sum and what lies between."""


def reached(curve: Sequence[Point], goal: float) -> tuple[float, float] | None:
    """(rollout steps, seconds) at which the accuracy first is `goal`, linear between two points; None: it never is."""
    for before, after in itertools.pairwise(curve):
        if after[2] >= goal:
            share = min(max((goal - before[2]) / (after[2] - before[2]), 0.0), 1.0) if after[2] > before[2] else 1.0
            return before[0] + share * (after[0] - before[0]), before[1] + share * (after[1] - before[1])
    return None


def train_ours(config: str, overrides: Sequence[str], every: int, seed: int, folder: Path) -> Learning:
    """One run of the product."""
    run_dir = folder / f"ours{seed}"
    settings = [f"run.seed={seed}", f"run.dir={run_dir}", "evaluation.greedy=false", "evaluation.forbidden_start=null"]
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "train", config, *overrides, *settings]
    call([*command, f"evaluation.every={every}"])
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return learning_of(steps, json.loads((run_dir / "summary.json").read_text())["heldout"])


def learning_of(steps: Sequence[dict[str, float]], heldout: dict[str, dict]) -> Learning:
    """The lines of metrics.jsonl, and the evaluations of summary.json, as one curve."""
    seconds, curve = 0.0, [(0, 0.0, heldout["before"]["sampled"]["accuracy"])]
    for step in steps:
        seconds += step["timing/step"] - step.get("timing/evaluation", 0.0)
        if "evaluation/sampled" in step:
            curve.append((int(step["rollout_step"]), seconds, step["evaluation/sampled"]))
    curve.append((len(steps), seconds, heldout["after"]["sampled"]["accuracy"]))
    phases = {name: sum(step[f"timing/{name}"] for step in steps) for name in OURS}
    return Learning(curve=curve, phases=phases | {"training": seconds})


def train_peer(options: argparse.Namespace, seed: int, first: Point, folder: Path) -> Learning:
    """One run of TRL. It starts from the same base, so it shares our first point."""
    out = folder / f"trl{seed}.json"
    command = [options.peer_python, "-m", "tests.benchmarks.train_trl", options.config, "--out", str(out)]
    command += ["--threads", str(options.peer_threads), *options.overrides]
    settings = [f"run.seed={seed}", f"evaluation.every={options.every}"]
    call([*command, *settings], OMP_NUM_THREADS=str(options.peer_threads))
    found = json.loads(out.read_text())
    return Learning(curve=[first, *map(tuple, found["curve"])], phases=found["phases"])


def call(command: Sequence[str], **variables: str) -> None:
    """Run it; its output is shown only if it fails."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{words}")


def print_tables(rounds: Sequence[tuple[Learning, Learning]], goal: float, names: tuple[str, str]) -> None:
    """Seconds to the goal of every round, their medians and ratio, and the phases."""
    print("| round | side | steps to the goal | seconds | seconds a step | at the end |")
    print("|---|---|---|---|---|---|")
    times: tuple[list[float], list[float]] = ([], [])
    for number, pair in enumerate(rounds, 1):
        for name, one, kept in zip(names, pair, times, strict=True):
            found, (steps, seconds, accuracy) = reached(one.curve, goal), one.curve[-1]
            words = f"{found[0]:.1f} | {found[1]:.1f}" if found else "not reached | -"
            print(f"| {number} | {name} | {words} | {seconds / steps:.2f} | {accuracy:.1%} |")
            kept.append(found[1] if found else float("inf"))
    ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
    ours, theirs = (statistics.median(side) for side in times)
    print(
        f"\nMedians: {ours:.1f} s against {theirs:.1f} s; ratio of each round {min(ratios):.2f} to {max(ratios):.2f}, "
        f"median {statistics.median(ratios):.2f} (above 1: {names[0]} is faster)\n"
    )
    for name, side in zip(names, zip(*rounds, strict=True), strict=True):
        mean = {phase: statistics.mean(one.phases[phase] for one in side) for phase in side[0].phases}
        total = mean.pop("training")
        shares = ", ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in mean.items())
        print(f"{name}: {total:.1f} s of training; {shares}")


def main() -> None:
    """Alternate, and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--peer-python", required=True, help="Python of the environment that has TRL")
    parser.add_argument("--peer-threads", type=int, default=os.cpu_count(), help="torch threads of TRL")
    parser.add_argument("--goal", type=float, default=0.6)
    parser.add_argument("--every", type=int, default=3, help="rollout steps between evaluations")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="file of rounds, read and appended to")
    options = parser.parse_intermixed_args()
    kept = options.keep.read_text().splitlines() if options.keep and options.keep.exists() else []
    rounds = [(Learning(**ours), Learning(**theirs)) for ours, theirs in map(json.loads, kept)]
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(len(rounds), options.rounds):
            ours = train_ours(options.config, options.overrides, options.every, seed, Path(folder))
            rounds.append((ours, train_peer(options, seed, ours.curve[0], Path(folder))))
            if options.keep:
                with options.keep.open("a") as file:
                    file.write(json.dumps([asdict(one) for one in rounds[-1]]) + "\n")
            print(f"round {seed + 1} done", file=sys.stderr, flush=True)
    print_tables(rounds, options.goal, ("megatron-dapo", "TRL"))


if __name__ == "__main__":
    main()
