"""`python -m tests.soak --minutes 60`: a long run of the quickstart under random kills.

Every minute or so one process of the run is killed (SIGKILL) or, if it is a server, perhaps stopped (SIGSTOP); the
command is given again when it was the coordinator. Memory and open files of every process are read meanwhile. Exit code
1: one of them grew, a process was left behind, or the ledger has a gap.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import psutil

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.storage.ledger import Event, effective_events, read_ledger
from tests.killer import MARKS
from tests.ledger_check import check_ledger
from tests.processes import ROOT, Running

PERIOD_S = 5.0
BETWEEN_KILLS_S = 55.0
WARM_UP_STEPS = 15
"""Rollout steps of a process's life that do not count, nor what is before them: imports, held-out problems, buffers and
connections of the first batches, memory that the trainer keeps for batches of any shape (flat after about 12 steps)."""
SHORTEST_S = 120.0
"""Lives that go on for less after that say nothing of growth."""
LEAST_OF = 24
"""Samples, two minutes, of whose open files the least is taken: a connection for each request under way comes and goes,
one that is lost stays."""
APART_S = 60.0
"""Between two samples that are compared."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_TOP_PAD_": "65536"}
"""glibc gives back at once what is freed. By its defaults a trainer rank keeps some 300 MB of it in gaps, more for each
new shape of a batch, and what is read would say little of the memory in use."""
STEADY = ("actor.optimizer.lr=1e-9",)
"""A policy that learns answers better and better, so that more and more groups, and connections, are under way."""
GROWTH_MB_PER_HOUR = 60.0
GROWTH_FILES_PER_HOUR = 20.0
VICTIMS = ("coordinator", "trainer", *["server"] * 6, *["stopped server"] * 3, *["reward"] * 9)
"""The first two end the lives of the trainer's ranks: rare enough that some go on for ten minutes."""
ROLES = {
    "trainer": ("ray::TrainerRank",),
    "server": ("sglang::", "rollout.server.launch_server"),
    "reward worker": ("reward.pool.worker",),
    "coordinator": ("megatron_dapo.cli.main",),
    "Ray": ("ray",),
}


@dataclass(kw_only=True)
class Life:
    """One process: seconds since the soak began, rollout steps done by then, resident bytes, open files."""

    role: str = ""
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Soak:
    """What has been seen so far."""

    lives: dict[tuple[int, float], Life] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    left_behind: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def sample(self, running: Running, run_dir: Path) -> None:
        """Read every process of the run once."""
        steps = steps_done(run_dir)
        for process in running.marked():
            try:
                with process.oneshot():
                    life = self.lives.setdefault((process.pid, process.create_time()), Life())
                    life.role = role_of(" ".join(process.cmdline()))  # Ray's workers take their names after the start
                    resident, files = process.memory_info().rss, process.num_fds()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            life.seconds.append(self.seconds)
            life.steps.append(steps)
            life.resident.append(resident)
            life.files.append(files)


def steps_done(run_dir: Path) -> int:
    """Lines of `metrics.jsonl`: rollout steps done, also those that a resumed run does again."""
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def role_of(command: str) -> str:
    return next((role for role, marks in ROLES.items() if any(mark in command for mark in marks)), "other")


def soak(run_dir: Path, minutes: float, seed: int, overrides: Sequence[str] = ()) -> Soak:
    """Run, kill, resume, for so long; ended by SIGTERM, which must save."""
    draw, seen = random.Random(seed), Soak()
    config = str(ROOT / "examples" / "quickstart" / "dapo.yaml")
    arguments = [
        "train",
        config,
        f"run.dir={run_dir}",
        "run.rollout_steps=100000",
        "run.resume=true",
        *STEADY,
        *overrides,
    ]
    while seen.seconds < minutes * 60:
        seen.starts += 1
        log = run_dir.parent / f"life{seen.starts}.txt"
        with mock.patch.dict(os.environ, ALLOCATOR):
            running = Running(*arguments, log=log)
        try:
            killed = one_life(running, seen, run_dir, draw, minutes * 60)
        except KeyboardInterrupt:  # the run must be gone before its folder goes
            running.process.kill()
            running.finish(180)
            raise
        finished = running.finish(180)
        seen.left_behind += finished.left_behind
        expected = (-signal.SIGKILL,) if killed else (ExitCode.CONTINUE,)
        if finished.code not in expected:
            words = finished.output if len(finished.output) < 20_000 else f"...{finished.output[-20_000:]}"
            raise AssertionError(f"exit code {finished.code} instead of {expected}:\n{words}")
    return seen


def one_life(running: Running, seen: Soak, run_dir: Path, draw: random.Random, until_s: float) -> bool:
    """From a start to the coordinator's death (True) or to the end of the soak, when it is asked to stop (False)."""
    next_kill = seen.seconds + draw.expovariate(1 / BETWEEN_KILLS_S)
    while running.process.poll() is None:
        if seen.seconds > until_s:
            running.signal(signal.SIGTERM)
            return False
        time.sleep(PERIOD_S)
        seen.sample(running, run_dir)
        if seen.seconds > next_kill:
            next_kill = seen.seconds + draw.expovariate(1 / BETWEEN_KILLS_S)
            victim = draw.choice(VICTIMS)
            if strike(running, victim):
                seen.kills[victim] += 1
                if victim == "coordinator":
                    return True
    return False


def strike(running: Running, victim: str) -> bool:
    """Kill or stop one process of that kind. Returns whether there was one."""
    if victim == "coordinator":
        running.process.kill()
        return True
    mark = MARKS[victim.removeprefix("stopped ")]
    for process in running.marked():
        try:
            if mark in " ".join(process.cmdline()):
                process.send_signal(signal.SIGSTOP if victim.startswith("stopped") else signal.SIGKILL)
                return True
        except psutil.NoSuchProcess:
            continue
    return False


def growth(lives: Sequence[Life], values: str) -> tuple[float, int]:
    """(median growth an hour between two samples of one life; lives that were long enough).

    What is imported once in a life, with the first problem that needs it, is no growth; what is kept at each step is.
    """
    slopes = []
    for life in lives:
        seconds = np.asarray(life.seconds)
        late = np.asarray(life.steps) >= life.steps[0] + WARM_UP_STEPS
        if not late.any() or seconds[-1] - seconds[late][0] < SHORTEST_S:
            continue
        hours = seconds[late] / 3600
        level = np.asarray(getattr(life, values), dtype=float)[late]
        if values == "files":
            files = np.asarray(life.files, dtype=float)
            level = np.array([files[: at + 1][-LEAST_OF:].min() for at in np.flatnonzero(late)])
        first, second = np.triu_indices(len(hours), 1)
        between = hours[second] - hours[first]
        far = between > APART_S / 3600
        slopes.append((level[second] - level[first])[far] / between[far])
    return (float(np.median(np.concatenate(slopes))) if slopes else 0.0), len(slopes)


def by_role(lives: Mapping[tuple[int, float], Life]) -> dict[str, list[Life]]:
    grouped: dict[str, list[Life]] = defaultdict(list)
    for life in lives.values():
        if life.seconds:
            grouped[life.role].append(life)
    return {role: grouped[role] for role in sorted(grouped)}


def judge(seen: Soak, run_dir: Path) -> tuple[str, list[str]]:
    """(a Markdown page, what is wrong)."""
    wrong = [f"left behind: {line}" for line in seen.left_behind]
    rows = []
    for role, lives in by_role(seen.lives).items():
        memory, counted = growth(lives, "resident")
        files, _ = growth(lives, "files")
        longest = max(life.seconds[-1] - life.seconds[0] for life in lives)
        largest, most = max(max(life.resident) for life in lives), max(max(life.files) for life in lives)
        rows.append(
            f"| {role} | {len(lives)} | {counted} | {longest / 60:.1f} | {largest / 1e6:.0f} | {memory / 1e6:+.1f} | "
            f"{most} | {files:+.1f} |"
        )
        if counted and memory / 1e6 > GROWTH_MB_PER_HOUR:
            wrong.append(f"{role}: memory grows by {memory / 1e6:.0f} MB an hour")
        if counted and files > GROWTH_FILES_PER_HOUR:
            wrong.append(f"{role}: open files grow by {files:.0f} an hour")
    events = read_ledger(run_dir / "ledger.jsonl")
    check_ledger(events)  # raises where a prompt is lost or trained twice
    trained = [event["prompt"] for event in effective_events(events) if event["event"] == Event.TRAINED]
    steps = sum(1 for _ in (run_dir / "metrics.jsonl").open())
    kills = ", ".join(f"{count} x {victim}" for victim, count in sorted(seen.kills.items()))
    page = [
        "# Soak: the quickstart under random kills",
        "",
        f"{seen.seconds / 60:.0f} minutes, {os.cpu_count()} CPU cores, {time.strftime('%Y-%m-%d')}: {steps} rollout "
        f"steps, {len(trained)} groups trained, none twice; {sum(seen.kills.values())} kills ({kills}); "
        f"{seen.starts} starts by hand; {len(seen.left_behind)} processes left behind.",
        "",
        f"Growth is the median between two samples of one life of a role, without its first {WARM_UP_STEPS} rollout "
        f"steps; lives with less than {SHORTEST_S:.0f} s after that are not counted. Of open files, the least of two "
        f"minutes. Bounds: "
        f"{GROWTH_MB_PER_HOUR:.0f} MB and {GROWTH_FILES_PER_HOUR:.0f} files an hour.",
        "",
        "| role | processes | counted | longest life, min | largest, MB | growth, MB/h | most open files | growth/h |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(page), wrong


def main() -> int:
    """Soak, print the page, say on standard error what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=Path, help="file for what was read of every process, as JSON")
    parser.add_argument("--folder", type=Path, help="kept afterwards (default: a temporary one)")
    parser.add_argument("overrides", nargs="*", help="section.key=value, as of `megatron-dapo train`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        seen = soak(folder / "run", options.minutes, options.seed, options.overrides)
        if options.samples:
            options.samples.write_text(json.dumps([asdict(life) for life in seen.lives.values()]))
        page, wrong = judge(seen, folder / "run")
    print(page)
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
