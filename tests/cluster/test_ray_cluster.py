"""Joining a Ray cluster that is not there, and losing one's own."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest

from megatron_dapo.cluster.placement import PlacementError
from megatron_dapo.cluster.ray_cluster import Cluster, ClusterError, _check_reachable, check_memory
from megatron_dapo.cluster.waits import StopRequested
from tests.processes import ROOT


def test_an_address_where_nothing_answers_is_named_at_once(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=f"RAY_ADDRESS = {address}"):
        Cluster(processes=1, device="auto")
    assert time.monotonic() - began < 15


def test_the_address_of_a_cluster_that_is_gone_is_named_at_once(monkeypatch):
    """Which `auto` finds in a file that Ray has left."""
    monkeypatch.setattr("megatron_dapo.cluster.ray_cluster.canonicalize_bootstrap_address", lambda _: "127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"RAY_ADDRESS = auto: no Ray answers at 127.0.0.1:1 "):
        Cluster(processes=1, device="auto")
    assert time.monotonic() - began < 15


def test_an_address_where_something_else_listens_is_named_in_time(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr("megatron_dapo.cluster.ray_cluster.CONNECT_DEADLINE_S", 0.5)
        began = time.monotonic()
        with pytest.raises(ClusterError, match=f"RAY_ADDRESS = {address}: no Ray answers at {address}"):
            Cluster(processes=1, device="auto")
        assert time.monotonic() - began < 15


def test_ray_is_not_asked_through_a_proxy(monkeypatch):
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        monkeypatch.setattr("megatron_dapo.cluster.ray_cluster.CONNECT_DEADLINE_S", 5.0)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        _check_reachable(f"127.0.0.1:{port}")
    finally:
        server.stop(None)


@pytest.mark.parametrize("moment", [pytest.param("starting", marks=pytest.mark.slow), "up"])
def test_nothing_of_ray_outlives_a_killed_coordinator(moment, tmp_path):
    # By process id: Ray's titles overwrite the environment, and its agents tried for a minute to reach a dead GCS.
    program = """
import time
from megatron_dapo.cli.train import prepare_environment
prepare_environment()
from megatron_dapo.cluster.ray_cluster import Cluster
print("starting", flush=True)
cluster = Cluster(processes=1, device="cpu")
print("up", flush=True)
time.sleep(1000)
"""
    link = Path("/tmp") / f"l{os.getpid()}"  # Ray's folder must have a short name; its files' names are then others
    link.symlink_to(tmp_path)
    try:
        check_nothing_outlives(program, moment, {**os.environ, "TMPDIR": str(link)})
        assert not list(tmp_path.iterdir()), "its folder goes too"
    finally:
        link.unlink()


def check_nothing_outlives(program: str, moment: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", program]
    coordinator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    assert coordinator.stdout is not None
    while coordinator.stdout.readline() != f"{moment}\n":
        assert coordinator.poll() is None
    wanted = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"} if moment == "up" else {"raylet"}
    deadline = time.monotonic() + 60
    while not wanted <= set(titles(below := children(coordinator.pid))):
        assert time.monotonic() < deadline, titles(below)
        time.sleep(0.05)
    coordinator.kill()
    coordinator.wait()
    deadline = time.monotonic() + 10
    while (left := [process for process in below if lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, titles(left)
    folder = Path(environment["TMPDIR"]).resolve()
    while list(folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)


def lives(process: psutil.Process) -> bool:
    """A zombie does not: an orphan stays one where nobody waits for it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def titles(processes: list[psutil.Process]) -> list[str]:
    """Of Ray's Python processes what they call themselves, of others the name."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            command = process.cmdline()
            own = command[0].strip() if command else ""
            found.append(own if own.startswith("ray::") else process.name())
    return found


@pytest.fixture(scope="module")
def own_cluster() -> str:
    """What a process says of its own Ray: where it listens, and when it saw the loss of the GCS.

    In a process of its own: a minute after that loss, Ray itself ends the process.
    """
    program = """
import http.client, os, psutil, time, urllib.request
from contextlib import suppress
from megatron_dapo.cli.train import prepare_environment
prepare_environment()
import ray
from megatron_dapo.cluster.ray_cluster import Cluster
cluster = Cluster(processes=1, device="cpu")

@ray.remote
class Actor:
    def address(self):
        return ray.util.get_node_ip_address()

actor = Actor.remote()
print("node", ray.get(actor.address.remote()))
me = psutil.Process()
for process in [me, *me.children(recursive=True)]:
    for found in process.net_connections("inet"):
        if found.status == psutil.CONN_LISTEN:
            print("listens", found.laddr.ip.removeprefix("::ffff:"), process.name())
            with suppress(OSError, ValueError, http.client.HTTPException):
                url = f"http://127.0.0.1:{found.laddr.port}/metrics"
                print("answers", urllib.request.urlopen(url, timeout=5).status)
print("folder", oct(os.stat(os.path.dirname(cluster._sweeper.rays)).st_mode))
assert not cluster.lost()
next(child for child in me.children() if child.name() == "gcs_server").kill()
began = time.monotonic()
while not cluster.lost() and time.monotonic() < began + 1:
    time.sleep(0.05)
print("lost", cluster.lost())
cluster.close()
print("closed")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert finished.stdout.endswith("closed\n"), finished.stdout + finished.stderr
    return finished.stdout


def test_nobody_outside_this_machine_reaches_the_runs_own_ray(own_cluster):
    lines = own_cluster.splitlines()
    assert "node 127.0.0.1" in lines
    listeners = [line.split()[1:] for line in lines if line.startswith("listens")]
    assert {name for _, name in listeners} >= {"gcs_server", "raylet"}
    assert {address for address, _ in listeners} == {"127.0.0.1"}, listeners


def test_another_user_of_this_machine_gets_no_answer_and_into_no_folder(own_cluster):
    """Ray makes its own folders writable for all, and its autoscaler would give figures to everybody."""
    lines = own_cluster.splitlines()
    assert [line for line in lines if line.startswith("answers")] == []
    assert "folder 0o40700" in lines


def test_the_loss_of_rays_gcs_is_seen_at_once_and_the_cluster_can_be_closed(own_cluster):
    assert "lost True" in own_cluster.splitlines()


def test_a_ray_that_does_not_come_up_is_an_error_of_ours(monkeypatch):
    def init(**_):
        raise Exception("The current node timed out during startup.")  # Ray's own words, and its own class

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("megatron_dapo.cluster.ray_cluster.ray.init", init)
    with pytest.raises(ClusterError, match="Ray could not be started: The current node timed out"):
        Cluster(processes=1, device="cpu")


def test_sigterm_while_ray_starts_is_a_stop(monkeypatch):
    def init(**_):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("megatron_dapo.cluster.ray_cluster.ray.init", init)
    with pytest.raises(StopRequested):
        Cluster(processes=1, device="cpu")
    assert signal.getsignal(signal.SIGTERM) is before


def test_more_trainer_processes_than_memory_holds_are_refused():
    check_memory(8, 16 << 30)
    with pytest.raises(PlacementError, match=r"1000 trainer processes.* lower actor\.layout"):
        check_memory(1000, 16 << 30)


@pytest.mark.slow
def test_a_ray_that_its_own_limit_has_ended_on_a_busy_machine_is_started_once_more():
    """By a clock on which the 30 s of the first start are over at once; nothing of that start is left."""
    program = """
import os, psutil, time
from megatron_dapo.cli.train import prepare_environment
prepare_environment()
import ray
from ray._private import node, services
from megatron_dapo.cluster.ray_cluster import Cluster
own, calls = services.get_node, []

def late(*arguments):
    calls.append(1)
    if len(calls) == 1:
        raise RuntimeError("not there yet")
    return own(*arguments)

class Clock:
    def __getattr__(self, name):
        return getattr(time, name)

    def monotonic(self):
        return time.monotonic() + 40 * (len(calls) == 1)

services.get_node, node.time = late, Clock()
cluster = Cluster(processes=1, device="cpu")
print(ray.get(ray.remote(lambda: os.getpid()).remote()) > 0, len(calls))
lives = [each.name() for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
print(lives.count("gcs_server"), lives.count("raylet"))
cluster.close()
print("closed")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert finished.stdout == "True 2\n1 1\nclosed\n", finished.stdout + finished.stderr
