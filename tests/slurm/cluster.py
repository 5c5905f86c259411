"""Debian's Slurm on this machine: a controller and virtual nodes, all below one folder, with ports of their own."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from rollout.server import end_with

START_S = 120.0
LEAVE_S = 60.0
"""For cancelled jobs to be gone."""
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
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin={task}
# A task without a number of its own gets one core.
TaskPluginParam=Cores
SelectType=select/cons_tres
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName={name}[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cpus} RealMemory=1000 \
Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
CGROUPS = Path("/sys/fs/cgroup")
CGROUP_CONFIG = f"""\
CgroupPlugin=cgroup/v1
CgroupMountpoint={CGROUPS}
ConstrainCores=yes
"""
"""Only where the machine has version 1 of cgroups: for version 2 slurmd wants a systemd."""


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
def slurm_cluster(folder: Path, *, nodes: int, cpus: int, gpus: int = 2) -> Iterator[dict[str, str]]:
    """A cluster of idle nodes. Yields the environment in which sbatch, squeue and scontrol reach it.

    Its GPUs are files without content: Slurm counts and hands them out.

    No job and no process of it is left at the end, also when the test is interrupted, or told to end.
    """
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(nodes + 1)
    first = ports[1]
    name = f"p{first}n"  # their cgroups are named so, and another cluster may be there
    text = CONFIG.format(
        host=host,
        name=name,
        gpus=gpus,
        task="task/affinity,task/cgroup" if has_cgroups() else "task/affinity",
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
    (folder / "cgroup.conf").write_text(CGROUP_CONFIG)
    for gpu in range(gpus):
        (folder / f"gpu{gpu}").touch()
    (folder / "gres.conf").write_text(f"NodeName={name}[1-{nodes}] Name=gpu File={folder}/gpu[0-{gpus - 1}]\n")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[bytes]] = []
    handler = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        daemons.append(_munged(folder / "munge"))
        daemons.append(_daemon(["slurmctld", "-D"], environment))
        for number in range(1, nodes + 1):
            (folder / f"{name}{number}").mkdir()
            daemons.append(_daemon(["slurmd", "-D", "-N", f"{name}{number}"], environment))
        _wait_until_idle(nodes, environment, folder)
        yield environment
    finally:
        _cancel_jobs(environment)
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        for process in left_of(folder):
            process.kill()
        _remove_cgroups(name)
        signal.signal(signal.SIGTERM, handler)


def has_cgroups() -> bool:
    """Whether Slurm can hold tasks to their cores by cgroups here."""
    return os.access(CGROUPS / "cpuset" / "cgroup.procs", os.W_OK)


def _remove_cgroups(name: str) -> None:
    """Of nodes `name`1, `name`2, ..., whose processes are gone."""
    for node in CGROUPS.glob(f"*/slurm_{name}*"):
        for inner in sorted((path for path in node.rglob("*") if path.is_dir()), reverse=True):
            with suppress(OSError):
                inner.rmdir()
        with suppress(OSError):
            node.rmdir()


def left_of(folder: Path) -> list[psutil.Process]:
    """Processes of the cluster below `folder`: its steps' keepers, which clear their environment, and what they run."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("SLURM_CONF") == str(folder / "slurm.conf")
            if not ours and process.name().startswith("slurmstepd"):
                ours = any(str(socket.laddr).startswith(f"{folder}/") for socket in process.net_connections("unix"))
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _cancel_jobs(environment: dict[str, str]) -> None:
    """Returns when they are gone, or the controller does not answer."""
    run = partial(subprocess.run, env=environment, capture_output=True, text=True, check=False, timeout=LEAVE_S)
    deadline = time.monotonic() + LEAVE_S
    with suppress(subprocess.TimeoutExpired):
        run(["scancel", "--user=root"])
        while run(["squeue", "-h"]).stdout.strip() and time.monotonic() < deadline:
            time.sleep(0.5)


def _daemon(command: list[str], environment: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Out of a terminal's reach, whose Ctrl-C would end it before its jobs, and gone with this process."""
    ending: Callable[[], None] = partial(end_with, os.getpid())
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=ending
    )


def _munged(folder: Path) -> "subprocess.Popen[bytes]":
    """Slurm's authentication, with a key and a socket of this test's own."""
    folder.mkdir(mode=0o711)
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    options = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    arguments = [f"--{name}={folder / file}" for name, file in options.items()]
    return _daemon(["munged", "--foreground", "--force", *arguments])


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
