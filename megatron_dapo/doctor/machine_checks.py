"""Packages, ports, limits and network of this machine; and what only a run on GPUs needs: the driver, torch, NCCL, the
kernels of trainer and servers, compilers."""

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_dapo.doctor.probing import FIX, LOST, Facts, Finding, cause, failed, passed, run, warning
from rollout.server.engine import hold_port

_SHOWN = [canonicalize_name(name) for name in ("torch", "megatron-core", "sglang", "ray", "transformers")]
_CONNECT_S = 3.0
_BUSY_SHARE = 0.1
_TRAINER = ("megatron.core", "transformer_engine.pytorch")
_SERVER = ("sgl_kernel", "flashinfer", "torch_memory_saver.utils", "sglang.srt.entrypoints.http_server")


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Every requirement inside its bounds."""
    installed = {canonicalize_name(one.name): one.version for one in importlib.metadata.distributions() if one.name}
    if (own := canonicalize_name("megatron-dapo")) not in installed:
        found = "megatron-dapo is on PYTHONPATH alone: bounds are not known, and no server starts on a CPU"
        yield (warning if facts.on_gpus else failed)(found, FIX["own package"])
        return
    declared = map(Requirement, importlib.metadata.requires(own) or [])
    # The extra names what training and generation need on any device.
    needed = [one for one in declared if one.marker is None or one.marker.evaluate({"extra": "cpu"})]
    for one in needed:
        version = installed.get(canonicalize_name(one.name))
        if version is None or not one.specifier.contains(version, prereleases=True):
            there = "is not installed" if version is None else f"{version} is installed"
            found = f"{one.name} {there}; needed: {one.specifier or 'any version'}"
            yield failed(found, FIX["package"].format(f"{one.name}{one.specifier}"))
    shown = ", ".join(f"{name} {installed[name]}" for name in _SHOWN if name in installed)
    yield passed(f"{len(needed)} packages inside their bounds: {shown}")


def check_ports(facts: Facts) -> Iterator[Finding]:
    """The servers' ports are free, or servers that someone else runs can be reached.

    Raises:
        ServerStartError: a port is taken.
    """
    rollout = facts.config.rollout
    for url in rollout.urls:
        try:
            port = (parts := urlsplit(url)).port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S).close()
        except (OSError, ValueError) as error:
            yield failed(f"no answer from {url}: {error}", FIX["remote server"])
    for index in range(0 if rollout.urls else rollout.servers):
        hold_port(rollout, index).close()
    yield passed(f"{rollout.host} can be listened on" if not rollout.urls else "all rollout.urls can be reached")


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Shared memory, through which Ray's object store and the ranks of a node talk."""
    # Ray puts the object store of a large node on the disk below /tmp where there is less.
    path, wanted = facts.root / "dev/shm", 10e9 if facts.on_gpus else 2e9
    free = shutil.disk_usage(path).free if path.is_dir() else 0
    shown = f"{free / 1e9:.1f} GB of shared memory free in {path}"
    yield passed(shown) if free >= wanted else warning(shown, FIX["shared memory"])


def check_network(facts: Facts) -> Iterator[Finding]:
    """Whether other nodes can reach this one by its name."""
    host, address = socket.gethostname(), "nothing"
    with suppress(OSError):
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    if address in ("nothing", "::1") or address.startswith("127."):
        joins = "RAY_ADDRESS" in os.environ or os.environ.get("SLURM_NNODES", "") not in ("", "1")
        several = joins or (facts.gpus and facts.elsewhere)
        # Gloo listens on the address of the name; Ray, where there is no route to the outside.
        make = failed if several and "GLOO_SOCKET_IFNAME" not in os.environ else warning
        yield make(f"{host} resolves to {address}: a run on several nodes would not meet", FIX["name"].format(host))
    yield passed(f"{host} is {address}")


def check_infiniband(facts: Facts) -> Iterator[Finding]:
    """Whether a port of an adapter is up, and NCCL may use it; else nodes talk over TCP, which is slow."""
    ports = sorted((facts.root / "sys/class/infiniband").glob("*/ports/*/state"))
    states = [f"{port.parents[2].name}:{port.parent.name} {port.read_text().strip()}" for port in ports]
    active = [state for state in states if state.endswith("ACTIVE")]
    if not active:
        yield warning(f"no InfiniBand or RoCE port is up ({', '.join(states) or 'no adapter'})", FIX["infiniband"])
    elif not list((facts.root / "dev/infiniband").glob("uverbs*")):
        yield warning(f"{', '.join(active)}, but this container has no /dev/infiniband/uverbs*", FIX["verbs"])
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if active and locked != resource.RLIM_INFINITY:
        yield warning(f"at most {locked / 1024:.0f} KiB of locked memory for NCCL over InfiniBand", FIX["memlock"])
    yield passed(", ".join(active))


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """How many there are, whether they suffice, and what is in the way of using them."""
    config, gpus, answer = facts.config, facts.gpus, facts.nvidia_smi
    if answer is not None and not gpus:
        said = f"{answer.stdout}\n{answer.stderr}".strip() or "no output"
        if "No devices were found" not in said:  # as on a login node
            why = f"(exit code {answer.returncode}): {said.splitlines()[-1]}"
            yield failed(f"nvidia-smi is here but lists no GPU {why}", FIX["driver"])
            return
        yield warning("nvidia-smi is here but finds no device", FIX["no device"])
    group = config.actor.layout.tensor
    shown = "none: a run here uses the CPU"
    if gpus:
        shown = f"{len(gpus)} x {gpus[0].name}, {gpus[0].memory:.0f} MiB, driver {gpus[0].driver}"
    if not gpus and config.actor.device == "cuda":
        yield failed("none is visible", FIX["no gpu"])
    elif not gpus and facts.elsewhere:
        cores = len(os.sched_getaffinity(0))
        found = f"none; {facts.elsewhere} processes of trainer and servers are too many for {cores} cores"
        here = config.actor.device == "cpu" or "SLURM_JOB_ID" in os.environ  # else as on a login node
        yield failed(found, FIX["cores"]) if here else warning(found, FIX["in a job"])
    elif gpus and facts.elsewhere and group > len(gpus):
        yield failed(f"{shown}; a tensor-parallel group of {group} stands on one node", FIX["group"])
    elif facts.elsewhere:
        if gpus and not config.rollout.urls:
            config.nodes_of_server(len(gpus))
        yield warning(f"{shown}; trainer and servers need {facts.elsewhere} more, on other nodes", FIX["in a job"])
    yield passed(shown)
    if busy := [str(number) for number, gpu in enumerate(gpus) if gpu.used > _BUSY_SHARE * gpu.memory]:
        yield warning(f"memory of GPU {', '.join(busy)} is in use", FIX["busy"])


def check_torch(facts: Facts) -> Iterator[Finding]:
    """A CUDA build that the driver can run, which sees all GPUs."""
    gpus, (version, cuda, devices, why) = facts.gpus, facts.torch
    shown = f"{version}, CUDA {cuda}"
    if not version:
        yield failed(f"cannot be imported: {why}", FIX["install"])
    elif not cuda:
        yield failed(f"{version} is a build without CUDA", FIX["install"])
    elif gpus and not devices:
        yield failed(f"{shown} sees no GPU, nvidia-smi does (driver {gpus[0].driver}): {why}", FIX["cuda"])
    elif devices < len(gpus):
        yield warning(f"{shown} sees {devices} of {len(gpus)} GPUs", FIX["hidden"])
    yield passed(shown)


def check_imports(facts: Facts) -> Iterator[Finding]:
    """Each in a child process, all at once."""
    fp8, colocated = facts.config.actor.fp8 != "none", facts.config.run.mode == "colocated"
    needed = {"transformer_engine.pytorch": fp8, "torch_memory_saver.utils": colocated}
    modules = _TRAINER + (() if facts.config.rollout.urls else _SERVER)
    with ThreadPoolExecutor(len(modules)) as threads:
        answers = list(threads.map(facts.run_python, (f"import torch, {module}" for module in modules)))
    for module, answer in zip(modules, answers, strict=True):
        absent = re.search(r"No module named '([\w.]+)'", cause(answer))
        if answer.returncode == 0:
            yield passed(module)
        elif absent is None or not f"{module}.".startswith(f"{absent[1]}."):
            yield failed(f"{module} is there and broken: {cause(answer)}", FIX["import"])
        elif module in LOST and not needed.get(module):
            yield warning(f"no {module}: {LOST[module]}", FIX["import"])
        else:
            yield failed(f"no {module}, which this run needs", FIX["import"])


def check_compilers(facts: Facts) -> Iterator[Finding]:
    """Triton and torch.compile build a module in C for Python; the servers' kernels are compiled when first used."""
    paths = sysconfig.get_paths()
    compiler = os.environ.get("CC", "").strip() or ("gcc" if shutil.which("gcc") else "clang")
    arguments = ("-fsyntax-only", "-I", paths["include"], "-include", "Python.h", "-xc", os.devnull)
    answer = run((*compiler.split(), *arguments))
    if answer.returncode != 0:
        yield failed(f"{compiler} cannot include Python.h ({paths['include']}): {cause(answer)}", FIX["c"])
    own_servers = not facts.config.rollout.urls
    if own_servers:
        search = f"{Path(facts.python[0]).parent}:{os.environ.get('PATH', '')}"  # as servers have it
        if missing := [program for program in ("c++", "ninja") if shutil.which(program, path=search) is None]:
            yield failed(f"no {', '.join(missing)} on PATH: servers compile kernels by it", FIX["c++"])
        named, nvcc = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), shutil.which("nvcc")
        home = Path(named) if named else Path(nvcc).parents[1] if nvcc else facts.root / "usr/local/cuda"
        # Where SGLang and flashinfer look.
        needed = ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so")
        if away := [name for name in needed if not (home / name).is_file()]:
            major = (facts.torch[1] or "13").partition(".")[0]
            own = Path(paths["purelib"]) / f"nvidia/cu{major}"
            fix = FIX["wheels" if (own / "bin/nvcc").is_file() else "toolkit"].format(own=own, major=major)
            yield failed(f"{home} has no {', '.join(away)}: servers compile kernels with it", fix)
    yield passed("C, C++, CUDA and ninja" if own_servers else "C")
