"""Runs a config and measures it: seconds of each phase, peak memory of each process. Prints a Markdown page.

python tools/measure_run.py examples/quickstart/dapo.yaml run.dir=runs/measured > docs/measurements/quickstart.md
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megatron_dapo.config import load_config

PERIOD_S = 0.5
OVERHEAD = ("reward", "logprob", "weight_sync", "handover", "evaluation", "checkpoint")


def main() -> int:
    """Run `megatron-dapo train` with the given arguments and print the page."""
    config_file, overrides = sys.argv[1], sys.argv[2:]
    run_dir = Path(load_config(config_file, overrides).run.dir)
    command = [str(Path(sys.executable).with_name("megatron-dapo")), "train", config_file, *overrides]
    process = subprocess.Popen(command, stdout=sys.stderr)
    peaks = watch(process)
    if process.returncode:
        return process.returncode
    print(page(run_dir, peaks, ["megatron-dapo", *command[1:]]))
    return 0


def watch(process: "subprocess.Popen[bytes]") -> dict[str, float]:
    """Largest proportional set size seen of each kind of process below `process`, in MB, until it ends."""
    peaks: dict[str, float] = {}
    while process.poll() is None:
        sizes: dict[str, float] = {}
        for child in descendants(process.pid):
            try:
                kind, size = kind_of(child), child.memory_full_info().pss / 1e6
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            sizes[kind] = sizes.get(kind, 0.0) + size
        sizes["all together"] = sum(sizes.values())
        for kind, size in sizes.items():
            peaks[kind] = max(peaks.get(kind, 0.0), size)
        time.sleep(PERIOD_S)
    return peaks


def descendants(pid: int) -> list[psutil.Process]:
    """The process and everything below it."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kind_of(process: psutil.Process) -> str:
    """What a process is, from its command line."""
    line = " ".join(process.cmdline())
    table = {
        "TrainerRank": "trainer rank",
        "sglang::scheduler": "SGLang scheduler",
        "sglang::detokenizer": "SGLang detokenizer",
        "rollout.server.launch_server": "SGLang main process",
        "reward": "reward workers",
        "megatron-dapo": "coordinator",
        "ray": "Ray (all its processes)",
    }
    for mark, kind in table.items():
        if mark in line:
            return f"{kind} {process.pid}" if kind == "trainer rank" else kind
    return "other"


def page(run_dir: Path, peaks: dict[str, float], command: list[str]) -> str:
    """The page: machine, command, phases, memory."""
    summary = json.loads((run_dir / "summary.json").read_text())
    manifest = json.loads((run_dir / "manifest.json").read_text())
    seconds = summary["seconds"]
    step = seconds["step"]
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items() if version)
    own = step - sum(seconds[name] for name in ("rollout", "update", *OVERHEAD))
    rest = step - seconds["rollout"] - seconds["update"]
    lines = [
        "# Measured run",
        "",
        f"`{' '.join(command)}`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores ({processor()}), "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {versions}",
        "",
        "| phase | seconds | share of the steps |",
        "|---|---|---|",
    ]
    for name in ("start", "evaluation_before", "training", "evaluation_after", "total"):
        if name in seconds:
            lines.append(f"| {name.replace('_', ' ')} | {seconds[name]:.1f} | |")
    for name in ("rollout", "update", *OVERHEAD):
        lines.append(f"| of the steps: {name.replace('_', ' ')} | {seconds[name]:.1f} | {seconds[name] / step:.1%} |")
    lines.append(f"| of the steps: coordinator itself | {own:.1f} | {own / step:.1%} |")
    lines += ["", f"Neither rollout nor update: {rest / step:.1%} of the steps.", ""]
    lines += ["| process | peak memory, MB (PSS) |", "|---|---|"]
    lines += [f"| {kind} | {size:.0f} |" for kind, size in number_ranks(peaks).items()]
    return "\n".join(lines)


def number_ranks(peaks: dict[str, float]) -> dict[str, float]:
    """Process ids of the trainer ranks replaced by 0, 1, ... and the sum last."""
    total = peaks["all together"]
    named, rank = {}, 0
    for kind, size in sorted(peaks.items()):
        if kind.startswith("trainer rank"):
            named[f"trainer rank {rank}"] = size
            rank += 1
        elif kind != "all together":
            named[kind] = size
    return named | {"all together": total}


def processor() -> str:
    """Model name of the CPU where Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    raise SystemExit(main())
