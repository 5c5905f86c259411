"""The program on each node, without Slurm: what it starts ends with it, and meets no other job on the same node."""

import socket
import subprocess
import time

import psutil
import pytest

from megatron_dapo.slurm import node
from tests.processes import Running


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """The first node and one more, joined; the run only sleeps."""
    run_dir = tmp_path / "run"
    (run_dir / "slurm").mkdir(parents=True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # of a shell in which a run was prepared
    started = []
    for rank in ("0", "1"):
        monkeypatch.setenv("SLURM_NODEID", rank)
        arguments = [str(run_dir), "200", str(tmp_path / f"python{rank}")]
        log = tmp_path / f"{rank}.txt"
        started.append(Running(*arguments, log=log, module="tests.slurm.standin_node"))
    try:
        _wait_for_both(started, run_dir)
        yield started
    finally:
        for node in started:
            node.kill_all()


def _wait_for_both(nodes, run_dir):
    """Until the run, which sleeps, has begun; a node that ended, or the deadline, shows what each wrote."""
    deadline = time.monotonic() + 200
    while "sleep" not in {process.name() for process in nodes[0].marked()}:
        if time.monotonic() > deadline or any(node.process.poll() is not None for node in nodes):
            written = [*run_dir.parent.glob("?.txt"), *run_dir.glob("slurm/*/*")]
            pytest.fail("\n".join(f"== {path}\n{path.read_text()}" for path in written if path.name != "token"))
        time.sleep(0.2)


AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They try for a minute to reach the head that is gone; a batch system ends them with their task."""


@pytest.mark.parametrize("code", [75, 0, -9])
def test_the_runs_exit_code_is_there_before_the_others_leave(code, tmp_path, monkeypatch):
    job = node.Job(rank=0, nodes=2, folder=tmp_path / "slurm" / "7.0", deadline_s=10.0)
    seen = []
    monkeypatch.setattr(node, "_start_ray", lambda *_: subprocess.Popen(["sleep", "60"]))
    monkeypatch.setattr(node, "_asked", lambda address: 0)
    monkeypatch.setattr(node, "_all_joined", lambda job, address: "[]")
    monkeypatch.setattr(node, "_run", lambda *_, **__: code)
    end = node._end
    monkeypatch.setattr(node, "_end", lambda ray: (seen.append((job.folder / "code").read_text()), end(ray)))
    assert node.lead(job, []) == code
    assert seen == [str(code % 256)]
    assert (job.folder / "done").exists()


@pytest.mark.slow
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


def test_the_head_is_where_srun_started_the_tasks_from(monkeypatch):
    """Not where the way to the internet begins, and no address of another node or of this one alone."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "the way to the internet")
    for told in ("127.0.0.1", "127.0.1.1", "203.0.113.7"):  # the last is for examples: nobody's
        monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", told)
        assert node._head_host() == "the way to the internet"
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR")
    assert node._head_host() == "the way to the internet"
    own = next(
        (
            found.address
            for all_of in psutil.net_if_addrs().values()
            for found in all_of
            if found.family == socket.AF_INET and not found.address.startswith("127.")
        ),
        None,
    )
    if own:
        monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", own)
        assert node._head_host() == own


def test_a_node_that_the_heads_address_does_not_reach_ends_the_job_at_once(tmp_path, monkeypatch):
    """Else the first node would wait for it until `run.start_deadline_s`."""
    monkeypatch.setattr(node, "SILENT_S", 0.5)
    job = node.Job(rank=1, nodes=2, folder=tmp_path, deadline_s=60.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # listens to nobody
        (tmp_path / "address").write_text(f"127.0.0.1:{closed.getsockname()[1]}")
        begin = time.monotonic()
        with pytest.raises(node.NodeError, match="from here nothing answers there"):
            node.follow(job)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_run_on_one_node_starts_its_own_ray(nodes, tmp_path, monkeypatch):
    """Only there may trainer and server share a GPU."""
    seen = {}
    monkeypatch.setattr(node, "lead", lambda job, arguments: seen.update(lead=job.nodes) or 0)
    monkeypatch.setattr(node, "_run", lambda job, arguments, **variables: seen.update(variables, alone=True) or 75)
    monkeypatch.setattr("sys.argv", ["node", str(tmp_path), "1", "train"])
    monkeypatch.setattr(node.os, "environ", {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_NNODES": nodes})
    code = node.main()
    assert (code, seen) == ((75, {"alone": True}) if nodes == "1" else (0, {"lead": 2}))
    assert ("RAY_AUTH_MODE" in node.os.environ) == (nodes == "2"), "alone, the run makes a token of its own"
    assert node.os.environ["RAY_memory_monitor_refresh_ms"] == "0"


def test_cores_that_a_step_does_not_get_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(node, "_run", lambda job, arguments: 0)
    monkeypatch.setattr("sys.argv", ["node", str(tmp_path), "1", "train"])
    given = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "8192"}
    monkeypatch.setattr(node.os, "environ", given)
    node.main()
    assert "8192 cores were asked for, and this step may use" in capsys.readouterr().err


def test_a_run_that_is_told_to_stop_before_it_begins_names_the_file(tmp_path, capsys):
    (tmp_path / "stop").touch()
    job = node.Job(rank=0, nodes=1, folder=tmp_path / "slurm" / "7.0", deadline_s=1.0)
    assert node._run(job, ["train"]) == 75
    assert f"{tmp_path}/stop is there" in capsys.readouterr().out
