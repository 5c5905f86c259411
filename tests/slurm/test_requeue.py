"""The generated script on a real Slurm of two nodes: it starts, is warned, goes back into the queue, ends the run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_dapo.cli.status import _has_job
from megatron_dapo.storage.ledger import effective_events, read_ledger
from tests.ledger_check import check_ledger
from tests.processes import ROOT
from tests.slurm.cluster import left_of, slurm_cluster, why_not

STEPS = 4
SMALL = (
    f"run.rollout_steps={STEPS}",
    "run.checkpoint_every=0",
    "algorithm.prompts_per_step=4",
    "algorithm.mini_batch_responses=16",
    "evaluation.limit=4",
    "actor.layout.tensor=2",
    "actor.layout.data=1",
    "rollout.servers=1",
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(folder, nodes=2, cpus=2) as environment:
        yield environment
    assert not left_of(folder)


def write_script(tmp_path: Path, *overrides: str) -> tuple[Path, Path]:
    """(script, run directory)."""
    run_dir, script = tmp_path / "run", tmp_path / "run.sbatch"
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "slurm", "examples/quickstart/dapo.yaml"]
    command += [*SMALL, *overrides, f"run.dir={run_dir}", "--gpus-per-node=0", "--cpus-per-node=2"]
    command += ["--time=60:00", "--warn=60", f"--setup=export PYTHONPATH={ROOT}", f"--out={script}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    return script, run_dir


def test_a_warned_job_is_requeued_and_goes_on_without_a_gap(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])  # `status` asks this cluster
    script, run_dir = write_script(tmp_path)
    assert "#SBATCH --nodes=2" in script.read_text(), "the trainer's TP group fills a node, the server needs another"
    job = submit(script, slurm)
    log = run_dir / "logs" / f"slurm-{job}.log"
    until(lambda: f"step 1/{STEPS}" in text(log), 600, log, slurm)
    # As `--signal=B:USR1@60` does when the time limit is near.
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], env=slurm, check=True)
    until(lambda: f"saved; job {job} is going back into the queue" in text(log), 300, log, slurm)
    assert "Slurm's warning before the time limit: stopping" in text(log)
    assert _has_job.__wrapped__(log, 0), "in the queue again"
    assert "2 node(s) have joined Ray" in text(log)
    assert "resuming" not in text(log), "the first start"
    until(lambda: re.search(r"resuming after rollout step [1-9]", text(log)), 600, log, slurm)
    until(lambda: state(job, slurm) == "COMPLETED", 600, log, slurm)
    until(lambda: not _has_job.__wrapped__(log, 0), 60, log, slurm)

    events = read_ledger(run_dir / "ledger.jsonl")
    check_ledger(events)
    trained = [event["prompt"] for event in effective_events(events) if event["event"] == "trained"]
    assert len(trained) == len(set(trained)) == 4 * STEPS
    assert sum(event["event"] == "resumed" for event in events) == 2, "the first start counts as one, from nothing"
    steps = [json.loads(line)["rollout_step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    assert (run_dir / "summary.json").exists()
    until(lambda: not of_run(run_dir), 30, log, slurm)


def test_a_run_that_does_not_fit_says_why_before_anything_loads(slurm, tmp_path):
    script, run_dir = write_script(tmp_path, "rollout.servers=4")
    script.write_text(script.read_text().replace("--nodes=3", "--nodes=2"))
    job = submit(script, slurm)
    log = run_dir / "logs" / f"slurm-{job}.log"
    until(lambda: state(job, slurm) == "FAILED", 300, log, slurm)
    assert "no node has room for a server (TP 1)" in text(log)
    until(lambda: not of_run(run_dir), 30, log, slurm)


def test_a_run_on_one_node_starts_its_own_ray_and_the_file_stop_ends_its_job_for_good(slurm, tmp_path):
    script, run_dir = write_script(tmp_path, "actor.layout.tensor=1", "--setup=echo setup of $SLURM_JOB_ID")
    assert "#SBATCH --nodes=1" in script.read_text()
    job = submit(script, slurm)
    log = run_dir / "logs" / f"slurm-{job}.log"
    until(lambda: f"step 1/{STEPS}" in text(log), 600, log, slurm)
    (run_dir / "stop").touch()
    until(lambda: state(job, slurm) == "FAILED", 300, log, slurm)
    assert f"setup of {job}" in text(log)
    assert "resuming" not in text(log), "the first start"
    assert f"{run_dir}/stop is there: stopping" in text(log)
    assert f"stopped by {run_dir}/stop, so not going back into the queue" in text(log)
    until(lambda: not of_run(run_dir), 30, log, slurm)

    again = submit(script, slurm)
    log = run_dir / "logs" / f"slurm-{again}.log"
    until(lambda: state(again, slurm) == "COMPLETED", 600, log, slurm)
    assert re.search(r"resuming after rollout step [1-9]", text(log))
    assert (run_dir / "summary.json").exists()
    assert not (run_dir / "slurm" / f"{again}.0").exists()
    assert "cores were asked for" not in text(log)
    until(lambda: not of_run(run_dir), 30, log, slurm)


def test_a_setup_line_that_fails_ends_the_job(slurm, tmp_path):
    script, run_dir = write_script(tmp_path, "--setup=module load no-such-module")
    job = submit(script, slurm)
    log = run_dir / "logs" / f"slurm-{job}.log"
    until(lambda: state(job, slurm) == "FAILED", 60, log, slurm)
    assert "a --setup line failed with exit code 127: module load no-such-module" in text(log)


PROBE = """#!/bin/sh
echo "node $SLURM_NODEID: $(env -u OMP_NUM_THREADS nproc) of $SLURM_CPUS_PER_TASK cores, $SLURM_GPUS_ON_NODE GPUs"
"""
GPUS = ["--gpus-per-node=2", "--cpus-per-node=2", "--time=60:00"]


def run_probe(script: Path, folder: Path, environment: dict[str, str]) -> tuple[list[str], str]:
    """(what the program on each node sees, how Slurm describes the job)."""
    probe = folder / "probe"
    probe.write_text(PROBE)
    probe.chmod(0o700)
    script.write_text(script.read_text().replace(f"  {sys.executable} -m", f"  {probe} -m"))
    job = submit(script, environment)
    log = folder / "run" / "logs" / f"slurm-{job}.log"
    until(lambda: state(job, environment) == "COMPLETED", 60, log, environment)
    shown = subprocess.run(["scontrol", "show", "job", job, "-o"], env=environment, capture_output=True, text=True)
    return sorted(line for line in text(log).splitlines() if line.startswith("node ")), shown.stdout


@pytest.mark.parametrize(
    ("recipe", "overrides", "seen", "shown"),
    [
        (
            "h100_32",
            ["actor.layout.tensor=2", "actor.layout.pipeline=1", "rollout.tensor_parallel=2", "rollout.servers=1"],
            ["node 0: 2 of 2 cores, 2 GPUs", "node 1: 2 of 2 cores, 2 GPUs"],
            ["OverSubscribe=NO", "TresPerNode=gres:gpu:2", "MinMemoryNode=0"],
        ),
        ("qwen2.5_1.5b_1gpu", [], ["node 0: 1 of 1 cores, 1 GPUs"], ["OverSubscribe=OK", "TresPerNode=gres:gpu:1"]),
    ],
)
def test_nodes_get_the_cores_gpus_and_exclusivity_of_the_recipe(recipe, overrides, seen, shown, slurm, tmp_path):
    script = tmp_path / "run.sbatch"
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "slurm", f"examples/qwen2.5_32b/{recipe}.yaml"]
    command += [*overrides, *GPUS, f"run.dir={tmp_path}/run"]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=60, capture_output=True, text=True)
    script.write_text(done.stdout)  # the log's folder is there also for a printed script
    lines, job = run_probe(script, tmp_path, slurm)
    assert lines == seen
    assert all(word in job for word in shown), job


def test_this_cluster_would_show_a_step_that_does_not_ask_for_its_cores(slurm, tmp_path):
    script, _ = write_script(tmp_path)
    with_cores = "srun --kill-on-bad-exit=1 --cpus-per-task=2"
    assert with_cores in script.read_text()
    script.write_text(script.read_text().replace(with_cores, "srun --kill-on-bad-exit=1"))
    lines, _ = run_probe(script, tmp_path, slurm)
    assert lines == ["node 0: 1 of 2 cores,  GPUs", "node 1: 1 of 2 cores,  GPUs"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_cluster_that_is_interrupted_leaves_nothing(number, tmp_path):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path / "slurm"
    program = f"""
import pathlib, signal, subprocess, time
from tests.slurm.cluster import slurm_cluster
signal.signal(signal.SIGINT, signal.default_int_handler)
with slurm_cluster(pathlib.Path({str(folder)!r}), nodes=1, cpus=1) as environment:
    subprocess.run(["sbatch", "--output=/dev/null", "--wrap", "srun sleep 1000"], env=environment, check=True)
    print("up", flush=True)
    time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any(line == "up\n" for line in iter(process.stdout.readline, ""))
    try:
        log = folder / "slurmctld.log"
        until(lambda: any("sleep" in left.name() for left in left_of(folder)), 120, log, os.environ)
    finally:
        process.send_signal(number)
        process.wait(150)
    assert not left_of(folder)


def submit(script: Path, environment: dict[str, str]) -> str:
    command = ["sbatch", "--parsable", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def state(job: str, environment: dict[str, str]) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job, "-o"], env=environment, capture_output=True, text=True)
    return next((word.split("=")[1] for word in shown.stdout.split() if word.startswith("JobState=")), "")


def text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def until(condition: Callable[[], object], seconds: float, log: Path, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        queue = subprocess.run(["squeue", "-o", "%i %T %r"], env=environment, capture_output=True, text=True).stdout
        assert time.monotonic() < deadline, f"{text(log)[-3000:]}\n{queue}"
        time.sleep(0.5)


def of_run(run_dir: Path) -> list[str]:
    """Command lines of processes that still belong to the run."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if str(run_dir) in line:
            found.append(line)
    return found
