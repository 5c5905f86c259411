"""Training seconds until held-out sampled accuracy reaches a goal: this system against TRL, in turns, in one run.

python -m tools.benchmarks.measure_learning examples/quickstart/dapo.yaml --peer-python trl-venv/bin/python run.rollout_steps=16

TRL runs from an environment of its own (tools/benchmarks/trl_requirements.txt). Both train on the config's data, model and
hyperparameters. Held-out accuracy is looked at after every `--every` rollout steps, and no clock runs meanwhile or
before the first step: TRL's stands still; ours is that of a second run of the same seed without evaluations, which
makes the same weights. CPU seconds, of all processes of a side, say what a machine that is busy with other work hides.

The goal is reached between two looks; the second is found on the straight line between them. What TRL does not have is
in tools/benchmarks/train_trl.py. Round r trains both with seed r. With `--keep FILE` the rounds are appended there, as JSON
lines, and those that it holds already are not run again: the tables are of them all.
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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

Point = tuple[int, float, float]
"""Rollout step, training seconds, accuracy."""

POLL_S = 0.1

OURS = ("rollout", "reward", "logprob", "update", "weight_sync", "checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """One training."""

    curve: list[Point]
    cpu: list[tuple[int, float]]
    """CPU seconds of all its processes up to the end of a rollout step."""
    phases: dict[str, float]
    """Seconds by phase, over the whole training."""


def reached(curve: Sequence[Point], goal: float) -> tuple[float, float] | None:
    """(rollout steps, seconds) at which the accuracy first is `goal`, linear between two points; None: it never is."""
    for before, after in itertools.pairwise(curve):
        if after[2] >= goal:
            share = min(max((goal - before[2]) / (after[2] - before[2]), 0.0), 1.0) if after[2] > before[2] else 1.0
            return before[0] + share * (after[0] - before[0]), before[1] + share * (after[1] - before[1])
    return None


def cpu_at(points: Sequence[tuple[int, float]], steps: float) -> float:
    """CPU seconds after so many rollout steps, linear between two of them."""
    for (start, before), (end, after) in itertools.pairwise([(0, 0.0), *points]):
        if steps <= end:
            return before + (steps - start) / (end - start) * (after - before)
    return points[-1][1]


def train_ours(config: str, overrides: Sequence[str], every: int, seed: int, folder: Path) -> Learning:
    """Two runs of the product: one is evaluated, the other only timed. The same seed makes the same weights.

    Raises:
        SystemExit: the two did not learn the same; rollout.deterministic is off, say.
    """
    common = [*overrides, f"run.seed={seed}", "evaluation.greedy=false", "evaluation.forbidden_start=null"]
    timed, evaluated = folder / f"timed{seed}", folder / f"evaluated{seed}"
    cpu = run_timed(config, [*common, f"run.dir={timed}", "evaluation.limit=1"], timed)
    call([*train_command(config), *common, f"run.dir={evaluated}", f"evaluation.every={every}"])
    clock, accuracy = metrics(timed), metrics(evaluated)
    if [line["grad_norm"] for line in clock] != [line["grad_norm"] for line in accuracy]:
        raise SystemExit(f"{timed} and {evaluated} did not learn the same; the config must be deterministic")
    read = [json.loads((run_dir / "summary.json").read_text()) for run_dir in (timed, evaluated)]
    return learning_of(clock, read[0], accuracy, read[1], cpu)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train_command(config: str) -> list[str]:
    """The product's command, without its overrides."""
    return [sys.executable, "-m", "megatron_dapo.cli.main", "train", config]


def run_timed(config: str, overrides: Sequence[str], run_dir: Path) -> list[tuple[int, float]]:
    """Run it and look, as each step ends, what CPU time its processes have used since training began."""
    with (run_dir.parent / f"{run_dir.name}.txt").open("w+") as output:
        process = subprocess.Popen([*train_command(config), *overrides], stdout=output, stderr=output)
        began, seen, points = 0.0, 0, list[tuple[int, float]]()
        while process.poll() is None:
            time.sleep(POLL_S)
            file = run_dir / "metrics.jsonl"
            lines = file.read_bytes().count(b"\n") if file.exists() else 0
            if not (run_dir / "heldout_before.json").exists():
                began = cpu_seconds(process.pid)  # the last of these is taken as training begins
            elif lines > seen:
                seen = lines
                points.append((lines, cpu_seconds(process.pid) - began))
        output.seek(0)
        if process.returncode:
            raise SystemExit(f"train {' '.join(overrides)}: exit code {process.returncode}\n{output.read()[-4000:]}")
    return points


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all below it."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
    return total


def learning_of(
    clock: Sequence[dict[str, float]],
    clock_summary: dict[str, dict],
    accuracy: Sequence[dict[str, float]],
    accuracy_summary: dict[str, dict],
    cpu: list[tuple[int, float]],
) -> Learning:
    """The metrics.jsonl and summary.json of both runs as one curve. What lies between steps is spread over them."""
    between = (clock_summary["seconds"]["training"] - sum(line["timing/step"] for line in clock)) / len(clock)
    heldout = accuracy_summary["heldout"]
    seconds, curve = 0.0, [(0, 0.0, heldout["before"]["sampled"]["accuracy"])]
    for timed, evaluated in zip(clock, accuracy, strict=True):
        seconds += timed["timing/step"] + between
        if "evaluation/sampled" in evaluated:
            curve.append((int(timed["rollout_step"]), seconds, evaluated["evaluation/sampled"]))
    curve.append((len(clock), seconds, heldout["after"]["sampled"]["accuracy"]))
    phases = {name: sum(line[f"timing/{name}"] for line in clock) for name in OURS}
    return Learning(curve=curve, cpu=cpu, phases=phases | {"training": seconds})


def train_peer(
    python: str, config: str, overrides: Sequence[str], every: int, seed: int, threads: int, first: Point, folder: Path
) -> Learning:
    """One run of TRL. It starts from the same base, so it shares our first point."""
    out = folder / f"trl{seed}.json"
    command = [
        python,
        "-m",
        "tools.benchmarks.train_trl",
        config,
        "--out",
        str(out),
        "--threads",
        str(threads),
        *overrides,
    ]
    call([*command, f"run.seed={seed}", f"evaluation.every={every}"], OMP_NUM_THREADS=str(threads))
    found = json.loads(out.read_text())
    return Learning(curve=[first, *map(tuple, found["curve"])], cpu=found["cpu"], phases=found["phases"])


def call(command: Sequence[str], **variables: str) -> None:
    """Run it; its output is shown only if it fails."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{words}")


def print_tables(rounds: Sequence[tuple[Learning, Learning]], goal: float, names: tuple[str, str]) -> None:
    """Seconds to the goal of every round, their medians and ratio, and the phases."""
    print("| round | side | steps to the goal | seconds | CPU seconds | seconds a step | CPU a step | at the end |")
    print("|---|---|---|---|---|---|---|---|")
    times: tuple[list[float], list[float]] = ([], [])
    for number, pair in enumerate(rounds, 1):
        for name, one, kept in zip(names, pair, times, strict=True):
            found, (steps, seconds, accuracy) = reached(one.curve, goal), one.curve[-1]
            words = "not reached | - | -"
            if found:
                words = f"{found[0]:.1f} | {found[1]:.1f} | {cpu_at(one.cpu, found[0]):.1f}"
            each = f"{seconds / steps:.2f} | {one.cpu[-1][1] / one.cpu[-1][0]:.2f}"
            print(f"| {number} | {name} | {words} | {each} | {accuracy:.1%} |")
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
