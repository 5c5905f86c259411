"""The program on each node, without Slurm: what it starts ends with it, and meets no other job on the same node."""

import psutil
import pytest

from tests.processes import Running


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """The first node and one more, joined; the run only sleeps."""
    run_dir = tmp_path / "run"
    (run_dir / "slurm").mkdir(parents=True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    started = []
    for rank in ("0", "1"):
        monkeypatch.setenv("SLURM_NODEID", rank)
        arguments = ["--run-dir", str(run_dir), "--start-deadline", "200", "--", str(tmp_path / f"python{rank}")]
        log = tmp_path / f"{rank}.txt"
        started.append(Running(*arguments, log=log, module="tests.slurm.standin_node"))
    try:
        started[0].wait_for("2 node(s) have joined Ray", 200)
        yield started
    finally:
        for node in started:
            node.kill_all()


AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They try for a minute to reach the head that is gone; a batch system ends them with their task."""


@pytest.mark.timeout(300)
def test_nothing_outlives_a_killed_first_node_and_no_port_is_fixed(nodes):
    first, other = nodes
    names = {process.name() for process in first.marked()}
    assert {"gcs_server", "raylet", "sleep"} <= names
    ports = {
        found.laddr.port
        for process in (*first.marked(), *other.marked())
        for found in process.net_connections("inet")
        if found.status == psutil.CONN_LISTEN
    }
    assert len(ports) >= 5
    assert not ports & {6379, 8265, 10001, 52365, *range(10002, 10020)}, "ports that every Ray would take"

    first.process.kill()
    left = other.finish(15, passing=AGENTS)
    assert left.code == 0, "the exit code is the first node's"
    assert "is gone; leaving" in left.output
    assert (*left.left_behind, *first.finish(10, passing=AGENTS).left_behind) == ()
