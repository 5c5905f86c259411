"""What a run on GPUs imports and compiles: torch with driver and NCCL, kernels of trainer and servers, compilers."""

import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megatron_dapo.config import Config
from megatron_dapo.doctor.hardware import Gpu
from megatron_dapo.doctor.probing import Answer, Finding, Node, failed, passed, warning

INSTALL = "make install-gpu, or the pins of the GPU lock in requirements/"
IMPORT_DEADLINE_S = 180.0
"""Libraries of gigabytes, perhaps from a network file system."""

_DRIVERS = {12: 525, 13: 580}
"""Least driver for each CUDA, as NVIDIA's table of minor version compatibility has them."""

_COMPILERS = (
    ("CC", ("gcc", "clang"), "c", "Python.h", "install gcc and Python's headers (python3-dev), or set CC"),
    ("CXX", ("c++",), "c++", "vector", "install g++, or set CXX"),
)
"""Variable that names another one, programs, language, a header that must be found, the fix; the first for all runs."""

_PINNED = ("torch", "sglang-kernel", "flashinfer-python", "torch-memory-saver")

_MARK = "\x1e"
_TORCH = """
import json, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    cuda = torch.version.cuda
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = torch.cuda.nccl.version() if cuda else ()
    error = ""
    if cuda and not devices:
        try:
            torch.cuda.init()
        except Exception as raised:
            error = str(raised)
print("\\x1e" + json.dumps(dict(version=torch.__version__, cuda=cuda, devices=devices, nccl=nccl, error=error)))
"""
_TRY = """
import importlib, sys
try:
    import torch
    exec(sys.argv[2], {"part": importlib.import_module(sys.argv[1])})
except BaseException as error:
    absent = isinstance(error, ModuleNotFoundError) and f"{sys.argv[1]}.".startswith(f"{error.name}.")
    print("\\x1e" + ("" if absent else f"{type(error).__name__}: {error}"))
    sys.exit(1)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """As a child process finds it."""

    version: str
    cuda: str | None
    """None: a build for the CPU."""
    devices: int
    nccl: tuple[int, ...]
    error: str
    """Why CUDA could not be started, in torch's words."""

    @property
    def cuda_major(self) -> int:
        return int((self.cuda or "0").partition(".")[0])


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a run imports."""

    module: str
    lost: str
    """What a run does without it; none: it does not start."""
    then: str = ""
    """To be run after the import, which is called `part`."""
    fix: str = INSTALL


TRAINER = (
    Part("megatron.core", ""),
    Part(
        "transformer_engine.pytorch",
        "the trainer takes Megatron's own layers: slower, more memory with context parallelism, no FP8",
        fix=f"{INSTALL}; it is built after torch: pip install --no-build-isolation transformer-engine[pytorch]",
    ),
)
SERVER = (
    Part("sgl_kernel", ""),
    Part("flashinfer", "servers sample by PyTorch's kernels, which is slower"),
    Part(
        "torch_memory_saver.utils",
        "no run.mode: colocated, whose servers give their memory back by it",
        then="part.get_binary_path_from_package('torch_memory_saver_hook_mode_preload')",
    ),
    Part("sglang.srt.entrypoints.http_server", ""),
)


def probe_torch(node: Node) -> Torch | str:
    """What torch says in a process of its own, or why it cannot be imported."""
    answer = node.run([*node.python, "-c", _TORCH], IMPORT_DEADLINE_S)
    if answer.code != 0:
        return _cause(answer)
    found = json.loads(answer.output.rpartition(_MARK)[2])
    return Torch(**(found | {"nccl": tuple(found["nccl"]), "error": _first_line(found["error"])}))


def check_torch(torch: Torch | str, gpus: Sequence[Gpu], installed: Mapping[str, str]) -> Iterator[Finding]:
    """A CUDA build that the driver can run, which sees all GPUs and loads the NCCL that was installed with it."""
    if isinstance(torch, str):
        yield failed("torch", f"cannot be imported: {torch}", INSTALL)
        return
    if torch.cuda is None:
        yield failed("torch", f"{torch.version} is a build without CUDA", INSTALL)
        return
    driver, least = gpus[0].driver if gpus else "", _DRIVERS.get(torch.cuda_major, 0)
    major = re.match(r"\d+", driver)  # none in "[N/A]"
    if major and not torch.devices and int(major[0]) < least:
        found = f"{driver} is too old for CUDA {torch.cuda}, which torch {torch.version} is built for"
        fix = f"install driver {least} or newer (or NVIDIA's cuda-compat libraries for CUDA {torch.cuda})"
        yield failed("driver", found, fix)
    elif gpus and not torch.devices:
        found = f"{torch.version} sees no GPU, nvidia-smi does{torch.error and ': ' + torch.error}"
        fix = (
            "look at CUDA_VISIBLE_DEVICES; error 802: start nvidia-fabricmanager; error 803: driver and libcuda differ"
        )
        yield failed("torch", found, fix)
    elif torch.devices < len(gpus):
        found = f"sees {torch.devices} of {len(gpus)} GPUs"
        yield warning("torch", found, "unset CUDA_VISIBLE_DEVICES, unless others use the rest")
    elif gpus:
        yield passed("driver", f"{driver}; torch {torch.version} is built for CUDA {torch.cuda}")
    loaded = ".".join(map(str, torch.nccl[:3]))
    if (wheel := installed.get(f"nvidia-nccl-cu{torch.cuda_major}", loaded)) != loaded:
        found = f"NCCL {loaded} is loaded, {wheel} is installed"
        yield warning("collectives", found, "take the other libnccl.so.2 out of LD_LIBRARY_PATH and LD_PRELOAD")
    else:
        yield passed("collectives", f"NCCL {loaded}")


def check_imports(node: Node, parts: Sequence[Part], needed: Mapping[str, str]) -> Iterator[Finding]:
    """Each in a child process, all at once.

    Args:
        needed: {module: key of the config that cannot do without it}, for parts that others can do without.
    """

    def imported(part: Part) -> Answer:
        return node.run([*node.python, "-c", _TRY, part.module, part.then], IMPORT_DEADLINE_S)

    with ThreadPoolExecutor(len(parts)) as threads:
        answers = dict(zip(parts, threads.map(imported, parts), strict=True))
    for part, answer in answers.items():
        absent = answer.code == 1 and _MARK in answer.output and not answer.output.rpartition(_MARK)[2].strip()
        asks = needed.get(part.module)
        if absent and part.lost and asks is None:
            yield warning("imports", f"no {part.module}: {part.lost}", part.fix)
        elif absent:
            yield failed("imports", f"no {part.module}, which {asks or 'every run on GPUs'} needs", part.fix)
        elif answer.code != 0:
            yield failed("imports", f"{part.module} is there and broken: {_cause(answer)}", part.fix)
    if good := [part.module for part, answer in answers.items() if answer.code == 0]:
        yield passed("imports", ", ".join(good))


def _cause(answer: Answer) -> str:
    """One line. sgl_kernel lists the causes of its failure in lines that begin with a dash."""
    if answer.code is None:
        return answer.error
    if answer.code < 0:
        return f"ended by signal {-answer.code}"
    said = answer.output.rpartition(_MARK)[2] if _MARK in answer.output else answer.error.strip().rpartition("\n")[2]
    inner = re.search(r"^- (\w*(?:Error|Exception): .*)", said, flags=re.MULTILINE)
    return _first_line(inner[1] if inner else said)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def check_pins(node: Node, installed: Mapping[str, str]) -> list[Finding]:
    """The compiled packages beside what SGLang's metadata asks for.

    A server does not start without sglang-kernel or with an older one; its kernels are built for one torch.
    """
    shown, wrong = [], []
    for one in map(Requirement, required_by_sglang(node)):
        name = canonicalize_name(one.name)
        if name not in _PINNED or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        version = installed.get(name)
        if version is not None and one.specifier.contains(version, prereleases=True):
            shown.append(f"{name} {version}")
            continue
        refused = version is None or any(Version(version) < Version(bound.version) for bound in one.specifier)
        make = failed if refused and name == "sglang-kernel" else warning
        there = f"{version} is installed" if version else "is not installed"
        wrong.append(make("SGLang's pins", f"{name} {there}; sglang asks for {one.specifier}", INSTALL))
    return wrong or ([passed("SGLang's pins", ", ".join(shown))] if shown else [])


def required_by_sglang(node: Node) -> list[str]:
    """Its requirements, as its metadata has them; none without SGLang."""
    found = importlib.metadata.distributions(name="sglang", path=list(node.packages))
    return next((one.requires or [] for one in found), [])


def check_compilers(node: Node, torch: Torch | str, *, servers: bool) -> Iterator[Finding]:
    """Triton and torch.compile build a module in C for Python; the servers' kernels are compiled when first used."""
    wrong = [finding for row in (_COMPILERS if servers else _COMPILERS[:1]) for finding in _compiler(node, *row)]
    if servers:
        wrong += _cuda_compiler(node, torch)
        folder = Path(node.python[0]).parent  # first on the servers' PATH
        if shutil.which("ninja", path=folder) is None and node.which("ninja") is None:
            found = f"no ninja in {folder} or on PATH: servers compile kernels by it"
            wrong.append(failed("compilers", found, f"pip install ninja, or {INSTALL}"))
    yield from wrong or [passed("compilers", "C, C++, CUDA and ninja" if servers else "C")]


def _compiler(
    node: Node, variable: str, programs: Sequence[str], language: str, header: str, fix: str
) -> Iterator[Finding]:
    there = [path for path in map(node.which, programs) if path]
    compiler = node.environment.get(variable, "").strip() or next(iter(there), None)
    if compiler is None:
        yield failed("compilers", f"no {' or '.join(programs)} on PATH", fix)
        return
    options = ("-fsyntax-only", "-I", str(node.headers), "-include", header, "-x", language, "/dev/null")
    answer = node.run([*compiler.split(), *options])
    if answer.code != 0:
        lines = answer.error.strip().splitlines() or [f"exit code {answer.code}"]
        line = next((line for line in lines if "error" in line), lines[-1])
        yield failed("compilers", f"{compiler} cannot include {header} ({node.headers}): {line[:300]}", fix)


def _cuda_compiler(node: Node, torch: Torch | str) -> list[Finding]:
    """nvcc, where SGLang and flashinfer look for it."""
    there = node.which("nvcc")
    named = node.environment.get("CUDA_HOME") or node.environment.get("CUDA_PATH")
    home = Path(named or (os.path.dirname(os.path.dirname(there)) if there else node.root / "usr/local/cuda"))
    fix = _toolkit(node, home, torch.cuda_major if isinstance(torch, Torch) and torch.cuda else 13)
    answer = node.run([str(home / "bin" / "nvcc"), "--version"])
    release = re.search(r"release (\d+)\.\d+", answer.output)
    if release is None:
        return [failed("compilers", f"no nvcc that runs in {home}/bin: servers compile kernels by it", fix)]
    if not (home / "include" / "cuda_runtime.h").is_file():
        return [failed("compilers", f"{home}: nvcc is there, include/cuda_runtime.h is not", fix)]
    if not (home / "lib64" / "libcudart.so").exists():
        found = f"no {home}/lib64/libcudart.so, which servers link their kernels with"
        return [warning("compilers", found, f"{fix}, or name the library's folder in LIBRARY_PATH")]
    if isinstance(torch, Torch) and torch.cuda and int(release[1]) != torch.cuda_major:
        return [warning("compilers", f"{home} is CUDA {release[1]}, torch is built for {torch.cuda}", fix)]
    return []


def _toolkit(node: Node, home: Path, major: int) -> str:
    """The fix for a toolkit in `home` that is not whole: that of the lock's wheels where they are installed, or the
    system's. The wheels have their libraries in lib, by full name only."""
    system = "install the CUDA toolkit of torch's version, and set CUDA_HOME to its folder"
    own = node.site / f"nvidia/cu{major}"
    if not (own / "bin" / "nvcc").is_file():
        return system
    steps = [f"export CUDA_HOME={own}"] if own != home else []
    if not (own / "lib64" / "libcudart.so").exists():
        link = f"ln -s ../lib/libcudart.so.{major} {own}/lib64/libcudart.so"
        steps.append(f"mkdir -p {own}/lib64 && {link}")
    return "; ".join(steps) + f"; or {system}" if steps else system


def parts_of(config: Config | None) -> tuple[tuple[Part, ...], dict[str, str]]:
    """What a run of `config` imports on this node, and {module: key} of what it needs more than others."""
    if config is None:
        return TRAINER + SERVER, {}
    fp8 = {"transformer_engine.pytorch": f"actor.fp8 = {config.actor.fp8}"} if config.actor.fp8 != "none" else {}
    shared = {"torch_memory_saver.utils": "run.mode = colocated"} if config.run.mode == "colocated" else {}
    return TRAINER + (() if config.rollout.urls else SERVER), fp8 | shared
