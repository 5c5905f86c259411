"""Disk, shared memory, ports, clocks and limits of this machine."""

import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from megatron_dapo.config import Config
from megatron_dapo.doctor.probing import Finding, failed, passed, warning, warning_if
from megatron_dapo.storage.run_dir import OWN_NAMES, RunDirError, has_run

SHARED_MEMORY_BYTES = 2e9
SHARED_MEMORY_GPU_BYTES = 10e9
"""Ray puts the object store of a large node on the disk below /tmp where there is less."""

_PROBE_BYTES = 64 * 2**20
_SLOW_SYNC_S = 300.0
_CLOCK_SKEW_S = 2.0
_OPEN_FILES = 4096
_CONNECT_S = 3.0
GB = 1e9


def check_disk(run_dir: Path, needed: float, weights: float) -> Iterator[Finding]:
    """Room and speed where the run will write, and that its clock is this machine's.

    Args:
        needed: bytes that weights and checkpoints of the run take.
        weights: bytes of one weight version, which is written at every rollout step.
    """
    folder = existing_parent(run_dir)
    if not os.access(folder, os.W_OK | os.X_OK):
        yield failed("disk", f"{folder} cannot be written to", "set run.dir to a folder of yours, or fix its rights")
        return
    free = shutil.disk_usage(folder).free
    room = f"{free / GB:.0f} GB free in {folder}"
    if free < needed:
        found = f"{room}; weights and checkpoints need {needed / GB:.0f} GB"
        yield failed("disk", found, "set run.dir to a larger disk, or lower run.keep_checkpoints")
        return
    yield passed("disk space", f"{room}, needed {needed / GB:.1f} GB")
    try:
        speed, skew = _probe(folder)
    except OSError as error:
        yield failed("disk", f"{folder}: {error.strerror}", "free some room there, or set run.dir to another disk")
        return
    yield check_speed(speed, weights)
    yield check_clock(skew, folder)


def check_speed(speed: float, weights: float) -> Finding:
    """`speed`: bytes/s written to the run's disk."""
    seconds = weights / speed
    shown = f"{speed / 1e6:.0f} MB/s written; a weight version of {weights / GB:.2f} GB takes {seconds:.0f} s"
    fix = "set run.dir to a faster file system: weights pass it at every rollout step"
    return warning_if(seconds > _SLOW_SYNC_S, "disk speed", shown, fix)


def check_clock(skew: float, folder: Path) -> Finding:
    """`skew`: seconds by which the file system's clock is ahead of this machine's."""
    if abs(skew) > _CLOCK_SKEW_S:
        fix = "let both follow the same time server (chronyc tracking); times in logs and locks would mislead"
        return warning("clock", f"the file system of {folder} is {skew:+.1f} s from this machine", fix)
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return passed("clock", f"{now}; the run's file system agrees within {abs(skew):.1f} s")


def _probe(folder: Path) -> tuple[float, float]:
    """Bytes/s of a write that reaches the disk, and how far its time stamp is ahead."""
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        began = time.perf_counter()
        for _ in range(_PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        os.utime(file.fileno())
        return _PROBE_BYTES / seconds, os.stat(file.fileno()).st_mtime - time.time()


def check_run_dir(run_dir: Path, *, resume: bool) -> Finding:
    """`train` refuses a directory that holds a run, unless it is to go on."""
    try:
        holds = has_run(run_dir)
    except RunDirError as error:
        return failed("run directory", str(error), "set run.dir to a folder of yours, or fix its rights")
    taken = [name for name in OWN_NAMES if (run_dir / name).exists()]
    if taken and not holds and not resume:
        return failed("run directory", f"{run_dir} holds {', '.join(taken)} but no run", "set run.dir to an empty one")
    if holds and not resume:
        return failed("run directory", f"{run_dir} holds a run", "set run.resume=true to go on, or another run.dir")
    return passed("run directory", f"{run_dir} {'goes on' if holds else 'is free'}")


def check_shared_memory(path: Path, wanted: float = SHARED_MEMORY_BYTES) -> Finding:
    """Ray's object store and the ranks of a node talk through it."""
    fix = "give a container more: --shm-size=16g (docker), or mount a larger tmpfs there"
    if not path.is_dir():
        return warning("shared memory", f"no {path}", fix)
    free = shutil.disk_usage(path).free
    return warning_if(free < wanted, "shared memory", f"{free / GB:.1f} GB free in {path}", fix)


def check_open_files(limit: int | None = None) -> Finding:
    """Ray, the servers and the HTTP client each hold many descriptors."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return passed("open files", "no limit")
    fix = f"ulimit -n {_OPEN_FILES} before the run"
    return warning_if(soft < _OPEN_FILES, "open files", f"at most {soft} a process", fix)


def check_ports(config: Config | None) -> Finding:
    """The servers' ports are free, or servers that someone else runs can be reached."""
    rollout = None if config is None else config.rollout
    if rollout is not None and rollout.urls:
        if away := [url for url in rollout.urls if not _reachable(url)]:
            return failed("ports", f"no answer from {', '.join(away)}", "start these servers, or correct rollout.urls")
        return passed("ports", f"{len(rollout.urls)} servers of rollout.urls can be reached")
    wanted = [0] if rollout is None or not rollout.port else range(rollout.port, rollout.port + rollout.servers)
    host = "127.0.0.1" if rollout is None else rollout.host
    taken = [(port, error) for port in wanted if (error := _bind_error(host, port)) is not None]
    if taken:
        what = ", ".join(f"{host}:{port} ({error})" for port, error in taken)
        return failed("ports", f"cannot listen on {what}", "set rollout.port=0 for free ones, or fix rollout.host")
    return passed("ports", f"{host} can be listened on")


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _bind_error(host: str, port: int) -> str | None:
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _reachable(url: str) -> bool:
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True
