"""Packages, ports, limits and network of this machine."""

import importlib.metadata
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_dapo.doctor.probing import Facts, Finding, failed, passed, warning
from rollout.server.engine import hold_port

_SHOWN = [canonicalize_name(name) for name in ("torch", "megatron-core", "sglang", "ray", "transformers")]
_SHARED_MEMORY = 2e9
_SHARED_MEMORY_GPU = 10e9
"""Ray puts the object store of a large node on the disk below /tmp where there is less."""

_CONNECT_S = 3.0


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Every requirement inside its bounds."""
    declared = map(Requirement, importlib.metadata.requires("megatron-dapo") or [])
    installed = {canonicalize_name(one.name): one.version for one in importlib.metadata.distributions() if one.name}
    # The extra names what training and generation need on any device.
    needed = [one for one in declared if one.marker is None or one.marker.evaluate({"extra": "cpu"})]
    for one in needed:
        version = installed.get(canonicalize_name(one.name))
        if version is None or not one.specifier.contains(version, prereleases=True):
            there = "is not installed" if version is None else f"{version} is installed"
            fix = f'make install, or pip install --no-deps "{one.name}{one.specifier}"'
            yield failed(f"{one.name} {there}; needed: {one.specifier or 'any version'}", fix)
    shown = ", ".join(f"{name} {installed[name]}" for name in _SHOWN if name in installed)
    yield passed(f"{len(needed)} packages inside their bounds: {shown}")


def check_ports(facts: Facts) -> Iterator[Finding]:
    """The servers' ports are free, or servers that someone else runs can be reached.

    Raises:
        ServerStartError: a port is taken.
    """
    rollout = facts.given.rollout
    for url in rollout.urls:
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S).close()
        except (OSError, ValueError) as error:
            yield failed(f"no answer from {url}: {error}", "start this server, or correct rollout.urls")
    for index in range(rollout.servers if facts.own_servers else 0):
        hold_port(rollout, index).close()
    yield passed(f"{rollout.host} can be listened on" if facts.own_servers else "all rollout.urls can be reached")


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Shared memory, through which Ray's object store and the ranks of a node talk."""
    path, wanted = facts.root / "dev/shm", _SHARED_MEMORY_GPU if facts.on_gpus else _SHARED_MEMORY
    free = shutil.disk_usage(path).free if path.is_dir() else 0
    if free < wanted:
        fix = "give a container more: --shm-size=16g (docker), or mount a larger tmpfs there"
        yield warning(f"{free / 1e9:.1f} GB of shared memory free in {path}", fix)
    yield passed(f"{free / 1e9:.1f} GB of shared memory free in {path}")


def check_network(facts: Facts) -> Iterator[Finding]:
    """Whether other nodes can reach this one by its name."""
    host, address = socket.gethostname(), "nothing"
    with suppress(OSError):
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    if address in ("nothing", "::1") or address.startswith("127."):
        # Gloo listens on the address of the name; Ray, where there is no route to the outside.
        make = failed if facts.several_nodes and "GLOO_SOCKET_IFNAME" not in os.environ else warning
        fix = f"give {host} its address in /etc/hosts, and no line with 127.0.1.1; or set GLOO_SOCKET_IFNAME"
        yield make(f"{host} resolves to {address}: a run on several nodes would not meet", fix)
    yield passed(f"{host} is {address}")


def check_infiniband(facts: Facts) -> Iterator[Finding]:
    """Whether a port of an adapter is up, and NCCL may use it; else nodes talk over TCP, which is slow."""
    ports = sorted((facts.root / "sys/class/infiniband").glob("*/ports/*/state"))
    states = [f"{port.parents[2].name}:{port.parent.name} {port.read_text().strip()}" for port in ports]
    active = [state for state in states if state.endswith("ACTIVE")]
    if not active:
        fix = "check driver (lspci), cable, switch and subnet manager (ibstat), or keep a run on one node"
        yield warning(f"no InfiniBand or RoCE port is up ({', '.join(states) or 'no adapter'})", fix)
    elif not list((facts.root / "dev/infiniband").glob("uverbs*")):
        found = f"{', '.join(active)}, but no /dev/infiniband/uverbs*: this container cannot use it"
        yield warning(found, "give the container /dev/infiniband (docker: --device /dev/infiniband)")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if active and locked != resource.RLIM_INFINITY:
        found = f"at most {locked / 1024:.0f} KiB of locked memory; InfiniBand locks NCCL's buffers"
        yield warning(found, "ulimit -l unlimited before the run (docker: --ulimit memlock=-1)")
    yield passed(", ".join(active))
