"""A run on a Ray cluster of two nodes that stands already: the trainer on one, the server on the other."""

import os
import secrets
import signal
import subprocess
import sys

import psutil
import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from tests.processes import ROOT, Running

CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"
SMALL = (
    "run.rollout_steps=2",
    "run.checkpoint_every=0",
    "algorithm.prompts_per_step=4",
    "algorithm.mini_batch_responses=16",
    "evaluation.limit=4",
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def address():
    """Address of a cluster whose nodes have 2 CPUs and 1 CPU: the trainer's TP group fits on the first alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_nodes", "2", "1"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert nodes.stdout is not None
        line = next((line for line in iter(nodes.stdout.readline, "") if line.startswith("address ")), None)
        assert line, "the cluster did not start"
        patch.setenv("RAY_ADDRESS", line.split()[1])
        yield line.split()[1]
        nodes.communicate(timeout=60)


def of_the_cluster(title: str) -> list[psutil.Process]:
    """Processes that know this cluster's token and whose title begins with `title`; its raylets start them, not us."""
    found = []
    for process in psutil.process_iter():
        try:
            known = process.environ().get("RAY_AUTH_TOKEN") == os.environ["RAY_AUTH_TOKEN"]
            if known and process.pid != os.getpid() and " ".join(process.cmdline()).startswith(title):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def start(run_dir, *overrides):
    arguments = ["train", str(CONFIG), f"run.dir={run_dir}", *SMALL, *overrides]
    return Running(*arguments, log=run_dir.parent / "out.txt")


@pytest.mark.slow
def test_trainer_and_server_stand_on_different_nodes_and_a_lost_server_host_comes_back(address, tmp_path):
    running = start(tmp_path / "run")
    running.wait_for("held-out problems before training", 200)
    (host,) = of_the_cluster("ray::ServerHost")
    host.kill()
    finished = running.finish(300)
    assert finished.code == ExitCode.FINISHED, finished.output
    assert "is down" in finished.output
    assert "is back with weight version" in finished.output
    log = (tmp_path / "run" / "logs" / "server0.log").read_text()
    assert f"--host {address.split(':')[0]}" in log, "servers listen on the cluster's interface, not on every one"
    assert finished.left_behind == ()
    assert not [process for process in of_the_cluster("") if "rollout.server.launch_server" in process.cmdline()]


def test_what_does_not_fit_is_explained_before_anything_loads(address, tmp_path):
    finished = start(tmp_path / "run", "rollout.servers=2").finish(60)
    assert finished.code == ExitCode.CONFIG, finished.output
    assert "no node has room for a server (TP 1)" in finished.output
    assert "2 CPUs" in finished.output
    assert finished.left_behind == ()


@pytest.mark.slow
def test_a_killed_run_frees_its_places(address, tmp_path):
    running = start(tmp_path / "run")
    running.wait_for("starting trainer and servers", 100)
    running.signal(signal.SIGKILL)
    running.finish(60)
    again = start(tmp_path / "again", "run.rollout_steps=1", "evaluation.limit=1").finish(300)
    assert again.code == ExitCode.FINISHED, again.output
