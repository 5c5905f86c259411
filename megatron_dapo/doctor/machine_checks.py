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

from megatron_dapo.doctor.probing import IMPORT_DEADLINE_S, IN_A_JOB, Facts, Finding, failed, passed, run, warning
from rollout.server.engine import hold_port

_SHOWN = [canonicalize_name(name) for name in ("torch", "megatron-core", "sglang", "ray", "transformers")]
_SHARED_MEMORY = 2e9
_SHARED_MEMORY_GPU = 10e9
"""Ray puts the object store of a large node on the disk below /tmp where there is less."""

_CONNECT_S = 3.0

INSTALL = "make install-gpu, or the pins of the GPU lock in requirements/"
_IMPORT_FIX = (
    f"{INSTALL}; TransformerEngine is built after torch: pip install --no-build-isolation transformer-engine[pytorch]"
)
_BUSY_SHARE = 0.1
_NO_DRIVER = "drain the node; reload the driver (modprobe nvidia) or reboot; without: actor.device=cpu"
_TRAINER = ("megatron.core", "transformer_engine.pytorch")
_SERVER = ("sgl_kernel", "flashinfer", "torch_memory_saver.utils", "sglang.srt.entrypoints.http_server")
_LOST = {
    "transformer_engine.pytorch": "the trainer takes Megatron's own layers: slower, more memory, no FP8",
    "flashinfer": "servers sample by PyTorch's kernels, which is slower",
    "torch_memory_saver.utils": "no run.mode: colocated, whose servers give their memory back by it",
}
"""What a run does without a part; it does not start without another one."""


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


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """How many there are, whether they suffice, and what is in the way of using them."""
    config, gpus, answer = facts.config, facts.gpus, facts.nvidia_smi
    if answer is not None and not gpus:
        said = f"{answer.output}\n{answer.error}".strip()
        if "No devices were found" not in said:  # as on a login node
            last = (said.splitlines() or ["no output"])[-1]
            yield failed(f"nvidia-smi is here but lists no GPU (exit code {answer.code}): {last}", _NO_DRIVER)
            return
        yield warning("nvidia-smi is here but finds no device", "run this on the node that has the GPUs")
    shown = "none: a run here uses the CPU"
    if gpus:
        shown = f"{len(gpus)} x {gpus[0].name}, {gpus[0].memory:.0f} MiB, driver {gpus[0].driver}"
    if not gpus and config is not None and config.actor.device == "cuda":
        yield failed("none is visible", "set actor.device=auto for a run on the CPU, or install the driver")
    elif not gpus and facts.elsewhere:
        cores = f"too many for {len(os.sched_getaffinity(0))} cores"
        found = f"none, and {facts.elsewhere} processes of trainer and servers are {cores}"
        here = facts.given.actor.device == "cpu" or "SLURM_JOB_ID" in os.environ  # else as on a login node
        yield failed(found, "lower actor.layout and rollout.servers") if here else warning(found, IN_A_JOB)
    elif gpus and facts.elsewhere and (group := facts.largest_group) > len(gpus):
        yield failed(f"{shown}; a tensor-parallel group of {group} stands on one node", "give this job all its GPUs")
    elif facts.elsewhere:
        yield warning(f"{shown}; trainer and servers need {facts.elsewhere} more, on other nodes", IN_A_JOB)
    else:
        yield passed(shown)
    if busy := [str(number) for number, gpu in enumerate(gpus) if gpu.used > _BUSY_SHARE * gpu.memory]:
        yield warning(f"memory of GPU {', '.join(busy)} is in use", "end what uses it: nvidia-smi lists the processes")


def check_torch(facts: Facts) -> Iterator[Finding]:
    """A CUDA build that the driver can run, which sees all GPUs."""
    torch, count = facts.torch, len(facts.gpus)
    shown = f"{torch.get('version')}, CUDA {torch.get('cuda')}"
    if "version" not in torch:
        yield failed(f"cannot be imported: {torch['cause']}", INSTALL)
    elif torch["cuda"] is None:
        yield failed(f"{torch['version']} is a build without CUDA", INSTALL)
    elif count and not torch["devices"]:
        fix = (
            "CUDA 12 needs driver 525 or newer, CUDA 13 driver 580 (or NVIDIA's cuda-compat libraries); look at "
            "CUDA_VISIBLE_DEVICES; error 802: start nvidia-fabricmanager; error 803: driver and libcuda differ"
        )
        driver = facts.gpus[0].driver
        yield failed(f"{shown} sees no GPU, nvidia-smi does (driver {driver}): {torch['cause']}", fix)
    elif torch["devices"] < count:
        found = f"{shown} sees {torch['devices']} of {count} GPUs"
        yield warning(found, "unset CUDA_VISIBLE_DEVICES, unless others use the rest")
    else:
        yield passed(shown)


def check_imports(facts: Facts) -> Iterator[Finding]:
    """Each in a child process, all at once. Without a GPU nothing is imported: kernels need the driver."""
    config, lost = facts.config, dict(_LOST)
    if config is not None and config.actor.fp8 != "none":
        del lost["transformer_engine.pytorch"]
    if config is not None and config.run.mode == "colocated":
        del lost["torch_memory_saver.utils"]
    modules = _TRAINER + (_SERVER if facts.own_servers else ())
    if not facts.gpus:
        yield passed("not looked at: kernels need a driver, and no GPU is visible")
        return
    with ThreadPoolExecutor(len(modules)) as threads:
        commands = ([*facts.python, "-c", f"import torch, {module}"] for module in modules)
        answers = list(threads.map(lambda command: run(command, IMPORT_DEADLINE_S), commands))
    for module, answer in zip(modules, answers, strict=True):
        absent = re.search(r"No module named '([\w.]+)'", answer.cause)
        if answer.code == 0:
            yield passed(module)
        elif absent is None or not f"{module}.".startswith(f"{absent[1]}."):
            yield failed(f"{module} is there and broken: {answer.cause}", _IMPORT_FIX)
        elif module in lost:
            yield warning(f"no {module}: {lost[module]}", _IMPORT_FIX)
        else:
            yield failed(f"no {module}, which this run needs", _IMPORT_FIX)


def check_compilers(facts: Facts) -> Iterator[Finding]:
    """Triton and torch.compile build a module in C for Python; the servers' kernels are compiled when first used."""
    paths = sysconfig.get_paths()
    compiler = os.environ.get("CC", "").strip() or ("gcc" if shutil.which("gcc") else "clang")
    answer = run(
        (*compiler.split(), "-fsyntax-only", "-I", paths["include"], "-include", "Python.h", "-xc", os.devnull)
    )
    if answer.code != 0:
        found = f"{compiler} cannot include Python.h ({paths['include']}): {answer.cause}"
        yield failed(found, "install gcc and Python's headers (python3-dev), or set CC")
    if not facts.own_servers:
        yield passed("C")
        return
    search = f"{Path(facts.python[0]).parent}:{os.environ.get('PATH', '')}"  # as servers have it
    if missing := [program for program in ("c++", "ninja") if shutil.which(program, path=search) is None]:
        yield failed(f"no {', '.join(missing)} on PATH: servers compile kernels by it", f"install g++; {INSTALL}")
    major, nvcc = (facts.torch.get("cuda") or "13").partition(".")[0], shutil.which("nvcc")
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    home = Path(named) if named else Path(nvcc).parents[1] if nvcc else facts.root / "usr/local/cuda"
    # Where SGLang and flashinfer look.
    needed = ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so")
    if away := [name for name in needed if not (home / name).is_file()]:
        fix = f"install the CUDA {major} toolkit, and set CUDA_HOME to its folder"
        own = Path(paths["purelib"]) / f"nvidia/cu{major}"
        if (own / "bin/nvcc").is_file():  # the lock's wheels: libraries in lib, by full name only
            link = f"mkdir -p {own}/lib64; ln -sf ../lib/libcudart.so.{major} {own}/lib64/libcudart.so"
            fix = f"export CUDA_HOME={own}; {link}; or {fix}"
        yield failed(f"{home} has no {', '.join(away)}: servers compile kernels with it", fix)
    yield passed("C, C++, CUDA and ninja")
