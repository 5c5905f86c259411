"""Debian's Slurm on this machine: a controller and virtual nodes, all below one folder, with ports of their own."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 60.0
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
# A job that goes back into the queue waits as long as its old credentials are good.
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} RealMemory=1000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why Slurm cannot run here; installs it first where that can be done."""
    programs = ("slurmctld", "slurmd", "sbatch", "munged")
    if os.geteuid() != 0:
        return "slurmd of a test cluster needs root"
    if all(shutil.which(program) for program in programs):
        return None
    if not shutil.which("apt-get"):
        return "Slurm is not installed, and there is no apt-get to install it"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update"],
        ["apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm", "munge"],
    ):
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired:
            return f"{' '.join(command)} did not end within 300 s"
        if done.returncode:
            return f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}"
    missing = [program for program in programs if not shutil.which(program)]
    return f"apt-get installed no {', '.join(missing)}" if missing else None


@contextmanager
def slurm_cluster(folder: Path, *, nodes: int, cpus: int) -> Iterator[dict[str, str]]:
    """A cluster of idle nodes. Yields the environment in which sbatch, squeue and scontrol reach it."""
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(nodes + 1)
    first = ports[1]
    text = CONFIG.format(
        host=host,
        controller=ports[0],
        folder=folder,
        user="root",
        nodes=nodes,
        first=first,
        last=first + nodes - 1,
        cpus=cpus,
    )
    (folder / "state").mkdir(parents=True)
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [_munged(folder / "munge")]
    try:
        daemons.append(subprocess.Popen(["slurmctld", "-D"], env=environment, stderr=subprocess.DEVNULL))
        for number in range(1, nodes + 1):
            (folder / f"spool.n{number}").mkdir()
            command = ["slurmd", "-D", "-N", f"n{number}"]
            daemons.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
        _wait_until_idle(nodes, environment, folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _munged(folder: Path) -> "subprocess.Popen[bytes]":
    """Slurm's authentication, with a key and a socket of this test's own."""
    folder.mkdir(mode=0o711)
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    options = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    arguments = [f"--{name}={folder / file}" for name, file in options.items()]
    return subprocess.Popen(["munged", "--foreground", "--force", *arguments], stderr=subprocess.DEVNULL)


def _wait_until_idle(nodes: int, environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        told = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=environment, capture_output=True, text=True)
        if told.stdout.split() == ["idle"] * nodes:
            return
        logs = "\n".join(file.read_text()[-1500:] for file in folder.glob("slurm*.log"))
        assert time.monotonic() < deadline, f"nodes are {told.stdout.split()} {told.stderr}\n{logs}"
        time.sleep(0.5)


def _free_ports(count: int) -> list[int]:
    """`count` ports, those after the first in a row."""
    for first in range(21000, 30000, 50):
        sockets = []
        try:
            for port in range(first, first + count):
                probe = socket.socket()
                sockets.append(probe)
                probe.bind(("", port))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for probe in sockets:
                probe.close()
    raise AssertionError("no free ports between 21000 and 30000")
