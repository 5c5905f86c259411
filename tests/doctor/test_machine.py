"""Disk, ports, shared memory, clock: each as it should be, and with a fault planted."""

import socket
from collections.abc import Iterator

import pytest

from megatron_dapo.config import load_config
from megatron_dapo.doctor import machine
from megatron_dapo.doctor.probing import Status
from megatron_dapo.plan.scenario import changed
from tests.plan.conftest import RECIPES


@pytest.fixture(scope="module")
def config():
    return load_config(RECIPES / "qwen2.5_7b_8gpu.yaml")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken


def test_a_disk_with_room_passes_and_keeps_nothing(tmp_path):
    found = list(machine.check_disk(tmp_path / "runs" / "new", needed=1e6, weights=1e6))
    assert [finding.status for finding in found] == [Status.PASS] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_fails(tmp_path):
    [finding] = machine.check_disk(tmp_path, needed=1e18, weights=1e6)
    assert finding.status is Status.FAIL
    assert "run.keep_checkpoints" in finding.fix


def test_a_folder_that_cannot_be_written_to_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    [finding] = machine.check_disk(tmp_path, needed=0, weights=0)
    assert finding.status is Status.FAIL


def test_a_disk_that_fills_up_while_it_is_written_fails(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert [finding.status for finding in machine.check_disk(tmp_path, needed=0, weights=0)] == [
        Status.PASS,
        Status.FAIL,
    ]


def test_a_slow_disk_and_a_clock_apart_are_warnings(tmp_path):
    assert machine.check_speed(1e9, weights=65e9).status is Status.PASS
    assert machine.check_speed(50e6, weights=65e9).status is Status.WARNING
    assert machine.check_clock(0.4, tmp_path).status is Status.PASS
    assert machine.check_clock(-30.0, tmp_path).status is Status.WARNING


def test_a_run_directory_is_free_or_goes_on_or_is_taken(tmp_path):
    assert machine.check_run_dir(tmp_path, resume=False).status is Status.PASS
    (tmp_path / "logs").mkdir()
    (tmp_path / "ledger.jsonl").touch()
    assert machine.check_run_dir(tmp_path, resume=False).status is Status.PASS, "a start that failed leaves these"
    (tmp_path / "ledger.jsonl").write_text("{}\n")
    assert machine.check_run_dir(tmp_path, resume=False).status is Status.FAIL
    assert machine.check_run_dir(tmp_path, resume=True).status is Status.PASS


def test_a_directory_with_files_of_another_kind_fails(tmp_path):
    (tmp_path / "model").mkdir()
    assert machine.check_run_dir(tmp_path, resume=False).status is Status.FAIL


def test_shared_memory(tmp_path):
    assert machine.check_shared_memory(tmp_path, wanted=1.0).status is Status.PASS
    assert machine.check_shared_memory(tmp_path, wanted=1e18).status is Status.WARNING
    assert machine.check_shared_memory(tmp_path / "none").status is Status.WARNING


def test_open_files():
    assert machine.check_open_files(65536).status is Status.PASS
    assert machine.check_open_files(1024).status is Status.WARNING


def test_a_taken_port_fails(config, listener):
    finding = machine.check_ports(changed(config, {"rollout.port": listener.getsockname()[1], "rollout.servers": 1}))
    assert finding.status is Status.FAIL
    assert "rollout.port=0" in finding.fix


def test_free_ports_pass(config):
    assert machine.check_ports(config).status is Status.PASS
    assert machine.check_ports(None).status is Status.PASS


def test_servers_of_someone_else_must_answer(config, listener):
    here = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert machine.check_ports(changed(config, {"rollout.urls": (here,)})).status is Status.PASS
    away = "http://127.0.0.1:1"
    finding = machine.check_ports(changed(config, {"rollout.urls": (here, away)}))
    assert finding.status is Status.FAIL
    assert away in finding.found
    assert here not in finding.found
