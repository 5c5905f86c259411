"""Runs a config as `run.mode` sync and async in turn, with the same seeds, and prints both side by side.

python -m tools.compare_modes examples/quickstart/dapo.yaml --runs runs/modes --seeds 0 1 > docs/measurements/modes.md

The order is sync, async, sync, async, ...: whatever else the machine does falls on both. Async runs with truncated
importance weights, since most of its tokens are a version old.

Where trainer and servers share cores, async gains what sync leaves idle, which is little: around a small model SGLang's
processes and the coordinator keep a second core busy. `--deeper N` gives the config's model N layers that change
nothing at first, so that most of the time goes into calculation, as it does on GPUs. The page says how many cores were
busy.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron_dapo.config import load_config
from tools.arguments import count
from tools.measure_run import processor

MODES = {"sync": ("run.mode=sync",), "async": ("run.mode=async", "algorithm.importance.mode=truncated")}
BUSY = "busy.json"
POLL_S = 0.1
PHASES = ("rollout", "reward", "logprob", "update", "weight_sync", "checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run."""

    mode: str
    seed: int
    summary: dict[str, Any]
    steps: Sequence[dict[str, Any]]
    busy: float
    """Cores of the machine that were busy during the steps after the first; NaN: nobody looked."""

    @property
    def training(self) -> float:
        """Seconds from the first step's begin to the last one's end."""
        return self.summary["seconds"]["training"]

    def accuracy(self, way: str) -> float:
        """Held-out accuracy after training."""
        return self.summary["heldout"]["after"][way]["accuracy"]


def main() -> None:
    """Run everything, then print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--runs", type=Path, required=True, help="folder that gets a run directory for each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="run.seed of the repetitions")
    parser.add_argument("--deeper", type=count, default=0, metavar="N", help="layers to add to the model")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides for both modes")
    arguments = parser.parse_args()
    overrides = list(arguments.set)
    if arguments.deeper:
        base = load_config(Path(arguments.config), overrides).model.path
        overrides.append(f"model.path={deepened(base, arguments.runs / 'model', arguments.deeper)}")
    done = [
        measured(arguments.config, mode, seed, arguments.runs, overrides) for seed in arguments.seeds for mode in MODES
    ]
    command = " ".join(["python -m tools.compare_modes", *sys.argv[1:]])
    print(page(done, command))


def deepened(base: str | Path, folder: Path, layers: int) -> Path:
    """`folder`, with the model of `base` and `layers` more, whose output projections are zero: the same logits until it
    is trained."""
    old = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    config = AutoConfig.from_pretrained(base)
    config.num_hidden_layers += layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * config.num_hidden_layers
    torch.manual_seed(0)  # the same model in every comparison
    new = AutoModelForCausalLM.from_config(config, dtype=old.dtype)
    new.load_state_dict(old.state_dict(), strict=False)
    for layer in new.model.layers[len(old.model.layers) :]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    new.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def measured(config: str, mode: str, seed: int, runs: Path, overrides: Sequence[str]) -> Measured:
    """Run it, unless a finished run is there already."""
    run_dir = runs / f"{mode}-{seed}"
    if not (run_dir / "summary.json").exists():
        command = [sys.executable, "-m", "megatron_dapo.cli.main", "train", config, *overrides, *MODES[mode]]
        busy = watched([*command, f"run.seed={seed}", f"run.dir={run_dir}"], run_dir / "metrics.jsonl")
        (run_dir / BUSY).write_text(json.dumps(busy))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return Measured(
        mode=mode,
        seed=seed,
        summary=json.loads((run_dir / "summary.json").read_text()),
        steps=[json.loads(line) for line in lines],
        busy=json.loads((run_dir / BUSY).read_text()) if (run_dir / BUSY).exists() else math.nan,
    )


def watched(command: Sequence[str], metrics: Path) -> float:
    """Run it; cores of this machine that were busy, whatever with, between the first and the last line of `metrics`."""
    looks: dict[int, tuple[float, float]] = {}
    """By lines: wall-clock and busy seconds when that many were first seen."""
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        while process.poll() is None:
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            looks.setdefault(lines, (time.monotonic(), busy_seconds()))
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise SystemExit(f"exit {process.returncode}: {' '.join(command)}")
    if max(looks) < 2:
        raise SystemExit("busy cores are counted from the first step's end to the last one's: run two steps or more")
    (began, before), (ended, after) = looks[min(set(looks) - {0})], looks[max(looks)]
    return (after - before) / (ended - began)


def busy_seconds() -> float:
    """Of all cores since the machine started."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def page(done: Sequence[Measured], command: str) -> str:
    """Markdown: every run, then the ratio of the modes."""
    lines = [
        "# sync and async",
        "",
        f"`{command}`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores ({processor()}). Runs one after the "
        "other in the order of the table.",
        "",
        "| mode | seed | training, s | greedy after, % | sampled after, % | tokens generated | trained "
        "| expired groups | tokens' age, versions | cores busy |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in done:
        tokens = run.summary["tokens"]
        age = sum(step["staleness/mean"] * step["tokens/trained"] for step in run.steps) / tokens["trained"]
        expired = sum(step["sampling/expired"] for step in run.steps)
        lines.append(
            f"| {run.mode} | {run.seed} | {run.training:.1f} | {100 * run.accuracy('greedy'):.1f} | "
            f"{100 * run.accuracy('sampled'):.1f} | {tokens['generated']} | {tokens['trained']} | {expired:.0f} | "
            f"{age:.2f} | {run.busy:.2f} |"
        )
    lines += ["", "| seconds in all steps, mean of the runs | " + " | ".join(MODES) + " |", "|---|---|---|"]
    for phase in (*PHASES, "step"):
        of_modes = [
            mean(sum(step[f"timing/{phase}"] for step in run.steps) for run in done if run.mode == mode)
            for mode in MODES
        ]
        lines.append(f"| {phase.replace('_', ' ')} | " + " | ".join(f"{seconds:.1f}" for seconds in of_modes) + " |")
    return "\n".join([*lines, "", *_ratios(done)])


def _ratios(done: Sequence[Measured]) -> list[str]:
    runs = {(run.mode, run.seed): run for run in done}
    seeds = dict.fromkeys(run.seed for run in done)
    faster = [runs["sync", seed].training / runs["async", seed].training for seed in seeds]
    lines = [f"Training, sync over async, by seed: {', '.join(f'{ratio:.2f}' for ratio in faster)}."]
    for way in ("greedy", "sampled"):
        points = [100 * (runs["async", seed].accuracy(way) - runs["sync", seed].accuracy(way)) for seed in seeds]
        lines.append(f"Accuracy, {way}, async less sync, points: {', '.join(f'{each:+.1f}' for each in points)}.")
    return lines


if __name__ == "__main__":
    main()
