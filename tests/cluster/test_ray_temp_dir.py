"""The folder of a run's own Ray: killed runs' are removed at the next start, live ones' never."""

import subprocess
import sys
import tempfile

import pytest

from megatron_dapo.cluster import ray_cluster
from megatron_dapo.cluster.ray_cluster import TEMP_PREFIX, RayTempDir
from tests.processes import ROOT

HEAD = """
import sys, tempfile, time
from megatron_dapo.cluster import ray_cluster
tempfile.tempdir, ray_cluster.LONGEST_PARENT = sys.argv[1], 1000
"""
HOLD = "folder = ray_cluster.RayTempDir()\nprint(folder.path, flush=True)\ntime.sleep(1000)"
OFTEN = """
for number in range(150):
    folder = ray_cluster.RayTempDir()
    (folder.path / "file").touch()
    time.sleep(0.001)
    (folder.path / "file").read_text()
    folder.remove()
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_cluster, "LONGEST_PARENT", 1000)
    return tmp_path


def started(parent, program):
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + program, str(parent)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def test_a_killed_runs_folder_goes_at_the_next_start_and_a_live_ones_stays(parent):
    killed, live = started(parent, HOLD), started(parent, HOLD)
    try:
        lost, kept = (process.stdout.readline().strip() for process in (killed, live))
        killed.kill()
        killed.wait(10)
        unlocked = parent / f"{TEMP_PREFIX}unlocked"
        unlocked.mkdir()
        mine = RayTempDir()
        assert {str(folder) for folder in parent.iterdir()} == {kept, str(mine.path), str(unlocked)}
        assert lost != kept
        mine.remove()
        assert not mine.path.exists()
    finally:
        killed.kill()
        live.kill()
        live.wait(10)


def test_somebody_elses_folder_stays(parent, monkeypatch):
    killed = started(parent, HOLD)
    killed.stdout.readline()
    killed.kill()
    killed.wait(10)
    with monkeypatch.context() as other:
        other.setattr("os.getuid", lambda: 12345)
        RayTempDir().remove()
        assert len(list(parent.iterdir())) == 1
    RayTempDir().remove()
    assert not list(parent.iterdir())


def test_runs_that_start_at_once_leave_each_others_folder_alone(parent):
    processes = [started(parent, OFTEN) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert not list(parent.iterdir())
