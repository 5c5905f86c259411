"""Training seconds until held-out sampled accuracy reaches a goal: this system against TRL, in turns, in one run.

python -m tools.measure_learning examples/quickstart/dapo.yaml --peer-python trl-venv/bin/python run.rollout_steps=16

TRL runs from an environment of its own (tools/peers/requirements.txt). Both train on the config's data, model and
hyperparameters, evaluate after every `--every` rollout steps, and their clocks stand still meanwhile and before the
first step. The goal is reached between two evaluations; the second is found on the straight line between them. What
TRL does not have is in tools/peers/train_trl.py. Round r trains both with seed r. With `--keep FILE` the rounds are
appended there, as JSON lines, and those that it holds already are not run again: the tables are of them all.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

Point = tuple[int, float, float]
"""Rollout step, training seconds, accuracy."""

OURS = ("rollout", "reward", "logprob", "update", "weight_sync", "checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """One training."""

    curve: list[Point]
    phases: dict[str, float]
    """Seconds by phase, over the whole training."""
    tokens: float | None = None
    """Response tokens generated, where known."""


def reached(curve: Sequence[Point], goal: float) -> tuple[float, float] | None:
    """(rollout steps, seconds) at which the accuracy first is `goal`, linear between two points; None: it never is."""
    for before, after in itertools.pairwise(curve):
        if after[2] >= goal:
            share = min(max((goal - before[2]) / (after[2] - before[2]), 0.0), 1.0) if after[2] > before[2] else 1.0
            return before[0] + share * (after[0] - before[0]), before[1] + share * (after[1] - before[1])
    return None


def train_ours(config: str, overrides: Sequence[str], every: int, seed: int, folder: Path) -> Learning:
    """One run of the product; its curve begins with the evaluation before training."""
    run_dir = folder / f"ours{seed}"
    settings = (
        f"run.dir={run_dir}",
        f"run.seed={seed}",
        f"evaluation.every={every}",
        "evaluation.greedy=false",
        "evaluation.forbidden_start=null",
    )
    call([sys.executable, "-m", "megatron_dapo.cli.main", "train", config, *overrides, *settings])
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    return learning_of(lines, summary)


def learning_of(lines: Sequence[dict[str, float]], summary: dict[str, dict]) -> Learning:
    """A run's metrics.jsonl and summary.json as a curve. What lies between the steps is spread over them evenly."""
    between = (summary["seconds"]["training"] - sum(line["timing/step"] for line in lines)) / len(lines)
    clock, curve = 0.0, [(0, 0.0, summary["heldout"]["before"]["sampled"]["accuracy"])]
    for line in lines:
        clock += line["timing/step"] - line["timing/evaluation"] + between
        if "evaluation/sampled" in line:
            curve.append((int(line["rollout_step"]), clock, line["evaluation/sampled"]))
    curve.append((len(lines), clock, summary["heldout"]["after"]["sampled"]["accuracy"]))
    phases = {name: sum(line[f"timing/{name}"] for line in lines) for name in OURS}
    return Learning(
        curve=curve, phases=phases | {"training": clock}, tokens=sum(line["tokens/generated"] for line in lines)
    )


def train_peer(
    python: str, config: str, overrides: Sequence[str], every: int, seed: int, threads: int, first: Point, folder: Path
) -> Learning:
    """One run of TRL. It starts from the same base, so it shares our first point."""
    out = folder / f"trl{seed}.json"
    command = [python, "-m", "tools.peers.train_trl", config, "--out", str(out), "--threads", str(threads), *overrides]
    call([*command, f"run.seed={seed}", f"evaluation.every={every}"], OMP_NUM_THREADS=str(threads))
    found = json.loads(out.read_text())
    return Learning(curve=[first, *map(tuple, found["curve"])], phases=found["phases"])


def call(command: Sequence[str], **variables: str) -> None:
    """Run it; its output is shown only if it fails."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{words}")


def print_tables(rounds: Sequence[tuple[Learning, Learning]], goal: float, names: tuple[str, str]) -> None:
    """Seconds to the goal of every round, their medians and ratio, and the phases."""
    print("| round | side | rollout steps to the goal | seconds | seconds a step | accuracy at the end |")
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
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(
        f"\nMedians: {ours:.1f} s against {theirs:.1f} s; ratio of each round {spread}, median "
        f"{statistics.median(ratios):.2f} (above 1: {names[0]} is faster)\n"
    )
    for name, side in zip(names, zip(*rounds, strict=True), strict=True):
        total = statistics.mean(one.phases["training"] for one in side)
        shares = ", ".join(
            f"{phase} {statistics.mean(one.phases[phase] for one in side) / total:.0%}"
            for phase in side[0].phases
            if phase != "training"
        )
        print(f"{name}: {total:.1f} s of training; {shares}")
    print("\ncurves (rollout step: seconds, accuracy)")
    for number, pair in enumerate(rounds, 1):
        for name, one in zip(names, pair, strict=True):
            print(f"round {number}, {name}: " + "; ".join(f"{s}: {t:.1f}, {a:.3f}" for s, t, a in one.curve))


def one_round(options: argparse.Namespace, seed: int, folder: Path) -> tuple[Learning, Learning]:
    """Both trainings of a seed, one after the other."""
    ours = train_ours(options.config, options.overrides, options.every, seed, folder)
    theirs = train_peer(
        options.peer_python,
        options.config,
        options.overrides,
        options.every,
        seed,
        options.peer_threads,
        ours.curve[0],
        folder,
    )
    return ours, theirs


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
            began = psutil.getloadavg()[0]
            rounds.append(one_round(options, seed, Path(folder)))
            if options.keep:
                with options.keep.open("a") as file:
                    file.write(json.dumps([asdict(one) for one in rounds[-1]]) + "\n")
            load = f"load average {began:.1f} to {psutil.getloadavg()[0]:.1f}"
            print(f"{time.strftime('%T')} round {seed + 1} done, {load}", file=sys.stderr, flush=True)
    print_tables(rounds, options.goal, ("megatron-dapo", "TRL"))


if __name__ == "__main__":
    main()
