"""A run on a Ray cluster of two nodes that stands already: the trainer on one, the server on the other."""

import signal

import pytest

from megatron_dapo.cli.exit_codes import ExitCode
from tests.end_to_end.joined import of_the_cluster, ray_nodes, server_processes
from tests.processes import ROOT, Running

CONFIG = ROOT / "examples" / "quickstart" / "dapo.yaml"
SMALL = (
    "run.rollout_steps=2",
    "run.checkpoint_every=0",
    "algorithm.prompts_per_step=4",
    "algorithm.mini_batch_responses=16",
    "evaluation.limit=4",
    "actor.layout.tensor=2",
    "actor.layout.data=1",
    "rollout.servers=1",
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def address():
    """Address of a cluster whose nodes have 2 CPUs and 1 CPU: the trainer's TP group fits on the first alone."""
    with ray_nodes("2", "1") as joined:
        yield joined


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
    assert not server_processes()


@pytest.mark.slow
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
