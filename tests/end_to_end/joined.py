"""A Ray cluster of this machine that a run joins, and the processes that the cluster's nodes start for it."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.processes import ROOT


@contextmanager
def ray_nodes(*nodes: str) -> Iterator[str]:
    """Address of a cluster of these nodes (tests.ray_nodes), which is also RAY_ADDRESS meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_nodes", *nodes],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert cluster.stdout is not None
        line = next((line for line in iter(cluster.stdout.readline, "") if line.startswith("address ")), None)
        assert line, "the cluster did not start"
        patch.setenv("RAY_ADDRESS", line.split()[1])
        yield line.split()[1]
        cluster.communicate(timeout=60)


def of_the_cluster(title: str) -> list[psutil.Process]:
    """Processes that know this cluster's token and whose title begins with `title`; its raylets start them, not us."""
    found = []
    for process in psutil.process_iter():
        try:
            known = process.environ().get("RAY_AUTH_TOKEN") == os.environ["RAY_AUTH_TOKEN"]
            if known and process.pid != os.getpid() and command(process).startswith(title):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def command(process: psutil.Process) -> str:
    """What it was started with; a server makes one word of it."""
    return " ".join(process.cmdline())


def server_processes() -> list[psutil.Process]:
    """The servers' own, which start the others of them."""
    return [process for process in of_the_cluster("") if " -m rollout.server.launch_server " in command(process)]
