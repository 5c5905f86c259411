"""TransformerEngine's torch extension: PyPI has its source only, so it is built here, against the torch of the lock.

Headers and nvcc come from the lock's own nvidia packages, which fit that torch; a CUDA toolkit on the machine is not
used. The machine must bring a C++ compiler and Python's headers. A wheel built elsewhere is taken instead where pip
finds one (PIP_FIND_LINKS=folder); what was built is kept below `wheels/` in the environment for that.
"""

import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from tools.install.command import InstallError, run
from tools.install.lock import Pin, Pins
from tools.install.pip import advice, pip
from tools.install.progress import Progress

EXTENSION = "transformer-engine-torch"
PACKAGES = (EXTENSION, "transformer-engine-cu13", "transformer-engine")
"""In the order of their install: one that is there without the others makes `import megatron.core` fail."""
LOST = "actor.layout.context above 1 and FP8 are lost, and training is slower"
HEADERS = (
    "cu13/bin/nvcc", "cu13/include/cuda_runtime.h", "cu13/include/cublas_v2.h", "cu13/include/nvrtc.h",
    "cudnn/include/cudnn.h", "nccl/include/nccl.h",
)  # fmt: skip
"""What the build reads, below the environment's `nvidia` folder."""
SOURCES = 33
SECONDS_A_SOURCE = 45.0
"""On one core, taken until the build has measured its own rate: 25 minutes in all."""
GIGABYTES_A_JOB = 2.0

_BUILT = re.compile(r"\s*\[(\d+)/(\d+)\] ")
_FAILED = re.compile(r"\berror: |FAILED: |[Kk]illed")
_AVAILABLE = re.compile(r"MemAvailable:\s+(\d+) kB")


def missing_tools() -> list[str]:
    """What the build needs of this machine and does not find, each with its remedy."""
    missing = []
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]  # of `ccache g++` its first word
    if shutil.which(compiler) is None:
        missing.append(f"the C++ compiler `{compiler}`: apt install g++, dnf install gcc-c++, or CXX=/path/to/g++")
    jobs = os.environ.get("MAX_JOBS") or "1"
    if not jobs.isdigit() or not int(jobs):
        missing.append(f"MAX_JOBS = {jobs}: a whole number, 1 or more, of compilers at a time")
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        missing.append(f"{include}/Python.h, Python's headers: apt install python3-dev of this Python's version")
    return missing


def missing_headers(site: Path) -> list[str]:
    """What the lock's nvidia packages should have brought and did not."""
    return [f"{site}/nvidia/{name}" for name in HEADERS if not (site / "nvidia" / name).exists()]


def has_wheel(python: Path, pin: Pin, *, scratch: Path, log: Path) -> bool:
    """Whether pip finds a built extension, in a folder or an index of its configuration."""
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:"]
    status, _ = run(
        [*pip(python), "install", *options, f"{pin.name}=={pin.version}"], scratch=scratch, log=log,
    )  # fmt: skip
    return status == 0


def refuse_build(missing: list[str]) -> None:
    """Say before a build what it would lack.

    Raises:
        InstallError: something is missing.
    """
    if missing:
        raise InstallError(
            "\n".join(
                [
                    "TransformerEngine's torch extension must be built, and for that this machine lacks:",
                    *(f"  {line}" for line in missing),
                    "Or give a folder that holds a built wheel (another machine's .venv/wheels/torch-*):",
                    "  PIP_FIND_LINKS=folder make install-gpu",
                    f"Or do without it ({LOST}):",
                    "  WITHOUT_TE=1 make install-gpu",
                ]
            )
        )


def wheel_of(
    python: Path, site: Path, pins: Pins, folder: Path, progress: Progress, *, scratch: Path, log: Path
) -> Path:
    """The extension's wheel for the lock's torch in `folder`: from an earlier build, found by pip, or built now.

    Raises:
        InstallError: something that the build needs is missing (found before it begins), or the build failed.
    """
    if kept_wheel(folder, pins) is None:
        pin = pins[EXTENSION]
        if not has_wheel(python, pin, scratch=scratch, log=log):
            refuse_build([*missing_tools(), *missing_headers(site)])
        _build(python, site, pin, _folder(folder, pins), progress, scratch=scratch, log=log)
    wheel = kept_wheel(folder, pins)
    if wheel is None:
        raise InstallError(f"pip ended well and left no wheel in {_folder(folder, pins)}; all that it said: {log}")
    return wheel


def kept_wheel(folder: Path, pins: Pins) -> Path | None:
    """The wheel that an earlier install built or was given, for the torch of `pins`."""
    pattern = f"{EXTENSION.replace('-', '_')}-{pins[EXTENSION].version}-*.whl"
    return next(_folder(folder, pins).glob(pattern), None)


def _folder(folder: Path, pins: Pins) -> Path:
    return folder / f"torch-{pins['torch'].version}"


def _build(python: Path, site: Path, pin: Pin, folder: Path, progress: Progress, *, scratch: Path, log: Path) -> None:
    variables = build_variables(python, site, os.environ)
    jobs = int(variables["MAX_JOBS"])
    done, total = 0, SOURCES

    def on_line(line: str) -> None:
        nonlocal done, total
        if match := _BUILT.match(line):
            done, total = int(match[1]), int(match[2])

    def on_tick() -> None:
        elapsed = progress.elapsed
        left = (total - done) * elapsed / done if done > jobs else total * SECONDS_A_SOURCE / jobs - elapsed
        progress.show(f"building TransformerEngine: {done} of {total} sources, {jobs} at a time", left_s=max(left, 5))

    # pip keeps built wheels by version alone: one from its cache may have been built against another torch.
    command = [*pip(python), "wheel", "-v", "--no-cache-dir", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder), f"{pin.name}=={pin.version}"]
    status, lines = run(command, scratch=scratch, log=log, on_line=on_line, on_tick=on_tick, variables=variables)
    if status != 0:
        errors = [line.strip()[:300] for line in lines if _FAILED.search(line)]
        hint = "Fewer compilers at a time need less memory: MAX_JOBS=1 make install-gpu"
        said = advice(lines, status, log=log).replace("make install`", "make install-gpu`")
        raise InstallError("\n".join([*errors[:4], said, hint]))


def build_variables(python: Path, site: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of the build."""
    memory = _AVAILABLE.search(Path("/proc/meminfo").read_text())
    fitting = int(int(memory[1]) / 1e6 / GIGABYTES_A_JOB) if memory else 1
    jobs = max(1, min(len(os.sched_getaffinity(0)), fitting))
    return {
        "CUDA_HOME": str(site / "nvidia" / "cu13"),
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
        # Otherwise it first looks for a wheel on a host that is no package index, and waits where that is unreachable.
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "MAX_JOBS": environment.get("MAX_JOBS") or str(jobs),
        "PATH": f"{python.parent}{os.pathsep}{environment.get('PATH', os.defpath)}",  # for ninja
    }
