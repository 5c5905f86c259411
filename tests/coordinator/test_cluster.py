"""Joining a Ray cluster that is not there, and losing one's own."""

import socket
import subprocess
import sys
import time

import pytest

from megatron_dapo.coordinator.cluster import Cluster, ClusterError, check_memory
from megatron_dapo.coordinator.placement import PlacementError
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


def test_an_address_where_something_else_listens_is_named_in_time(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr("megatron_dapo.coordinator.cluster.CONNECT_DEADLINE_S", 0.5)
        began = time.monotonic()
        with pytest.raises(ClusterError, match=f"RAY_ADDRESS = {address}: what listens there is not Ray"):
            Cluster(processes=1, device="auto")
        assert time.monotonic() - began < 15


def test_the_loss_of_rays_gcs_is_seen_at_once_and_the_cluster_can_be_closed():
    # In a process of its own: what Ray itself does then is to end it, a minute later.
    program = """
import psutil, time
from megatron_dapo.cli.train import prepare_environment
prepare_environment()
from megatron_dapo.coordinator.cluster import Cluster
cluster = Cluster(processes=1, device="cpu")
assert not cluster.lost()
next(child for child in psutil.Process().children() if child.name() == "gcs_server").kill()
began = time.monotonic()
while not cluster.lost() and time.monotonic() < began + 1:
    time.sleep(0.05)
lost = cluster.lost()
cluster.close()
print("lost", lost)
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert "lost True" in finished.stdout, finished.stdout + finished.stderr


def test_more_trainer_processes_than_memory_holds_are_refused():
    check_memory(8, 16 << 30)
    with pytest.raises(PlacementError, match=r"1000 trainer processes.* lower actor\.layout"):
        check_memory(1000, 16 << 30)
