"""TransformerEngine's torch extension: PyPI has its source only, so it is built here, against the torch of the lock.

Headers and nvcc come from the lock's own nvidia packages, which fit that torch; a CUDA toolkit on the machine is not
used. The machine must bring a C++ compiler and Python's headers. A wheel built elsewhere is taken instead where one is
found (PIP_FIND_LINKS=folder); what was built is kept below `wheels/` in the environment for that.
"""

import os
import shlex
import shutil
import sysconfig
from pathlib import Path

EXTENSION = "transformer-engine-torch"
PACKAGES = (EXTENSION, "transformer-engine-cu13", "transformer-engine")
"""In the order of their install: one that is there without the others makes `import megatron.core` fail."""
LOST = "actor.layout.context above 1 and FP8 are lost, and training is slower"
REFUSAL = f"""TransformerEngine's torch extension must be built, and for that this machine lacks:
  {{}}
Name a folder with a built wheel (another machine's .venv/wheels/torch-*): PIP_FIND_LINKS=folder make install-gpu
Or do without it ({LOST}): WITHOUT_TE=1 make install-gpu"""
"""What to say before a build that would lack something."""


def missing_tools() -> list[str]:
    """What the build needs of this machine and does not find, each with its remedy."""
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]  # of `ccache g++` its first word
    header = Path(sysconfig.get_path("include")) / "Python.h"
    needs = []
    if shutil.which(compiler) is None:
        needs.append(f"the C++ compiler `{compiler}`: apt install g++, dnf install gcc-c++, or CXX=/path/to/g++")
    if not header.exists():
        needs.append(f"{header}, Python's headers: apt install python3-dev of this Python's version")
    return needs


def build_variables(python: str, site: Path) -> dict[str, str]:
    """Environment variables of the build."""
    return {
        "CUDA_HOME": str(site / "nvidia" / "cu13"),
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
        # Otherwise it first looks for a wheel on a host that is no package index, and waits where that is unreachable.
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # for ninja
    }
