"""What of a Ray is ended, and who else is left alone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_dapo.cluster.ray_sweeper import RAYS, RaySweeper

HOLD = "import sys, time\nfile = open(sys.argv[1], sys.argv[2])\nprint('open', flush=True)\ntime.sleep(1000)"


def holding(log: Path, mode: str, title: str = sys.executable) -> subprocess.Popen[str]:
    """A Python process with this title that has `log` open."""
    command = [title, "-c", HOLD, str(log), mode]
    process = subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


@pytest.fixture
def place(tmp_path):
    """(a folder of Ray's by another name than its own, the same by its own)"""
    real, link = tmp_path / "real", tmp_path / "link"
    for ray in ("mine", "other"):
        (real / ray / RAYS / "session_1").mkdir(parents=True)
        (real / ray / RAYS / "session_1" / "log").touch()
    link.symlink_to(real)
    return link, real


def test_rays_own_processes_end_and_nobody_else(place):
    link, real = place
    mine, other = (real / name / RAYS / "session_1" / "log" for name in ("mine", "other"))
    rays = [holding(mine, "a", "ray::Agent"), holding(link / "mine" / RAYS / "session_1" / "log", "a", "ray::Agent")]
    others = {
        "a reader of the logs": holding(mine, "r"),
        "one that writes a log of its own there": holding(mine.with_name("notes"), "w"),
        "another run's Ray": holding(other, "a", "ray::Agent"),
    }
    try:
        RaySweeper(str(link / "mine")).close()
        assert [process.wait(10) for process in rays] == [-9, -9]
        assert [name for name, process in others.items() if process.poll() is not None] == []
    finally:
        for process in (*rays, *others.values()):
            process.kill()
            process.wait()


@pytest.mark.parametrize("sweepers", [2, 1])
def test_the_end_of_the_coordinator_is_enough(place, sweepers):
    """Also where a sweeper is killed with it."""
    link, real = place
    agent = holding(real / "mine" / RAYS / "session_1" / "log", "a", "ray::Agent")
    program = "import os, signal, sys; from megatron_dapo.cluster.ray_sweeper import RaySweeper\n"
    program += f"for each in RaySweeper(sys.argv[1])._processes[{sweepers}:]: each.kill()\n"
    program += "os.kill(os.getpid(), signal.SIGKILL)"
    try:
        subprocess.run([sys.executable, "-c", program, str(link / "mine")], check=False, env=dict(os.environ))
        assert agent.wait(10) == -9
        deadline = time.monotonic() + 10
        while (real / "mine").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.parametrize("killed", [1, 2])
def test_a_sweeper_that_was_killed_is_made_up_for(place, killed):
    link, real = place
    agent = holding(real / "mine" / RAYS / "session_1" / "log", "a", "ray::Agent")
    try:
        sweeper = RaySweeper(str(link / "mine"))
        found = [child for child in psutil.Process().children() if "ray_sweeper.py" in " ".join(child.cmdline())]
        for process in found[:killed]:
            process.kill()
            while process.status() != psutil.STATUS_ZOMBIE:  # not waited for: that is the sweeper's
                time.sleep(0.01)
        sweeper.close()
        assert agent.wait(10) == -9
        assert not (real / "mine").exists()
    finally:
        agent.kill()
        agent.wait()
