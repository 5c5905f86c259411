"""TransformerEngine's torch extension: PyPI has its source only, so it is built here, against the torch of the lock.

Headers and nvcc come from the lock's own nvidia packages, which fit that torch; a CUDA toolkit on the machine is not
used. The machine must bring a C++ compiler and Python's headers. A wheel built elsewhere is taken instead where one is
found (PIP_FIND_LINKS=folder); what was built is kept below `wheels/` in the environment for that.
"""

import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

EXTENSION = "transformer-engine-torch"
PACKAGES = (EXTENSION, "transformer-engine-cu13", "transformer-engine")
"""In the order of their install: one that is there without the others makes `import megatron.core` fail."""
LOST = "actor.layout.context above 1 and FP8 are lost, and training is slower"
REMEDY = f"""Or give a folder that holds a built wheel (another machine's .venv/wheels/torch-*):
  PIP_FIND_LINKS=folder make install-gpu
Or do without it ({LOST}):
  WITHOUT_TE=1 make install-gpu"""
GIGABYTES_A_JOB = 2.0


def missing_tools() -> list[str]:
    """What the build needs of this machine and does not find, each with its remedy."""
    missing = []
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]  # of `ccache g++` its first word
    if shutil.which(compiler) is None:
        missing.append(f"the C++ compiler `{compiler}`: apt install g++, dnf install gcc-c++, or CXX=/path/to/g++")
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        missing.append(f"{include}/Python.h, Python's headers: apt install python3-dev of this Python's version")
    return missing


def refusal(missing: list[str]) -> str:
    """What to say before a build that would lack something."""
    needs = "TransformerEngine's torch extension must be built, and for that this machine lacks:"
    return "\n".join([needs, *(f"  {line}" for line in missing), REMEDY])


def build_variables(python: Path, site: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of the build."""
    memory = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
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
