"""Memory that a process may take: the host's, or what the tightest of its control groups leaves."""

from pathlib import Path

import psutil
import pytest

from megatron_dapo.actor.checkpoint.shard_writer import available_bytes

GIB = 2**30
UNLIMITED = 2**63 - 4096
"""What version 1 says of a group without a limit."""


def version_2(folder: Path) -> None:
    job = folder / "groups" / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    (job / "step_0" / "memory.max").write_text("max\n")
    (job / "memory.max").write_text(f"{6 * GIB}\n")
    (job / "memory.current").write_text(f"{4 * GIB}\n")
    (job / "memory.stat").write_text(f"anon {3 * GIB}\ninactive_file {GIB}\n")
    (folder / "own").write_text("0::/slurm/job_7/step_0\n")


def version_1(folder: Path) -> None:
    job = folder / "groups" / "memory" / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    (job / "step_0" / "memory.limit_in_bytes").write_text(f"{UNLIMITED}\n")
    (job / "memory.limit_in_bytes").write_text(f"{6 * GIB}\n")
    (job / "memory.usage_in_bytes").write_text(f"{4 * GIB}\n")
    (job / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {GIB}\n")
    (folder / "own").write_text("8:pids:/elsewhere\n5:memory:/slurm/job_7/step_0\n1:name=systemd:/\n0::/\n")


@pytest.mark.parametrize("write", [version_1, version_2])
def test_the_tightest_group_counts(tmp_path, monkeypatch, write):
    """A job of 6 GiB, of which 4 are taken, one by cached files; the step inside has no limit of its own."""

    class Host:
        available = 100 * GIB

    write(tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Host)
    assert available_bytes(tmp_path / "groups", tmp_path / "own") == 3 * GIB
    Host.available = 2 * GIB
    assert available_bytes(tmp_path / "groups", tmp_path / "own") == 2 * GIB


def test_without_groups_it_is_the_hosts(tmp_path):
    nowhere = available_bytes(tmp_path / "none", tmp_path / "none")
    assert nowhere == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert 0 < available_bytes() <= psutil.virtual_memory().total
