"""A made-up GPU node: files, programs and Python packages in a folder. A test takes one thing away, or breaks it."""

import resource
import shlex
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron_dapo.doctor.config_checks import examine
from megatron_dapo.doctor.probing import NO_CONFIG, Facts, Finding, Status

GPU = "NVIDIA H100 80GB HBM3, 81559, 4, 580.65.06"
GCC = """#!/bin/sh
while [ $# -gt 0 ]; do
    if [ "$1" = -I ]; then
        [ -f "$2/Python.h" ] || { echo "<command-line>: fatal error: Python.h: No such file or directory" >&2; exit 1; }
    fi
    shift
done
"""
TORCH = """
__version__ = "2.11.0+cu130"


class version:
    cuda = "13.0"


class cuda:
    def init():
        pass

    def device_count():
        return 8
"""
NO_DRIVER = TORCH.replace("pass", "raise RuntimeError('Error 802: system not yet initialized')")
MODULES = {
    "torch": TORCH,
    "megatron.core": "",
    "transformer_engine.pytorch": "",
    "sgl_kernel": "",
    "flashinfer": "",
    "torch_memory_saver.utils": "",
    "sglang.srt.entrypoints.http_server": "",
}


class GpuMachine:
    """Eight H100s where every check passes, below `root`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.programs, self.site = root, root / "bin", root / "site"
        self.cuda = root / "usr/local/cuda"
        for name, text in {
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
            "dev/infiniband/uverbs0": "",
            "dev/shm/taken": "",
            "include/Python.h": "",
            "usr/local/cuda/bin/nvcc": "",
            "usr/local/cuda/include/cuda_runtime.h": "",
            "usr/local/cuda/lib64/libcudart.so": "",
        }.items():
            self.write(name, text)
        self.gpus(GPU)
        self.program("gcc", GCC)
        self.program("c++", "#!/bin/sh\n")
        self.program("ninja", "#!/bin/sh\n")
        self.program("python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', root / "venv/bin")
        for module, code in MODULES.items():
            self.write(f"site/{module.replace('.', '/')}/__init__.py", code)
        paths = sysconfig.get_paths() | {"include": str(root / "include"), "purelib": str(self.site)}
        limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
        monkeypatch.setattr(socket, "gethostname", lambda: "node7")
        monkeypatch.setattr(resource, "getrlimit", lambda name: limit)
        monkeypatch.setenv("PATH", str(self.programs))
        monkeypatch.setenv("PYTHONPATH", str(self.site))
        for name in ("RAY_ADDRESS", "SLURM_NNODES", "CUDA_HOME", "CUDA_PATH", "CC"):
            monkeypatch.delenv(name, raising=False)
        self.monkeypatch = monkeypatch
        self.address("10.0.0.7")

    def address(self, address: str) -> None:
        """What the node's name resolves to."""
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))]
        self.monkeypatch.setattr(socket, "getaddrinfo", lambda *name: found)

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.monkeypatch.setenv(name, value)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def program(self, name: str, script: str, folder: Path | None = None) -> None:
        path = (folder or self.programs) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def module(self, name: str, code: str | None) -> None:
        """What importing it does; None: it is not installed."""
        folder = self.site / name.replace(".", "/")
        if code is None:
            shutil.rmtree(self.site / name.partition(".")[0])
        else:
            (folder / "__init__.py").write_text(code)

    def gpus(self, line: str) -> None:
        """What nvidia-smi says of each."""
        self.program("nvidia-smi", f'#!/bin/sh\nfor gpu in 0 1 2 3 4 5 6 7; do echo "{line}"; done\n')

    def facts(self, config=NO_CONFIG) -> Facts:
        python = (str(self.root / "venv/bin/python"), "-S")  # without this environment's own packages
        return Facts(config, root=self.root, python=python)

    def examine(self, config=NO_CONFIG) -> list[tuple[str, Finding]]:
        """All but `versions`, which are those of a whole environment, and what the config names."""
        left_out = {"versions", "model", "disk", "host memory", "inputs"}
        return [(name, finding) for name, finding in examine(self.facts(config)) if name not in left_out]

    def problems(self, config=NO_CONFIG) -> list[tuple[Status, str, str]]:
        """(status, check, found) of all that does not pass."""
        return [(f.status, name, f.found) for name, f in self.examine(config) if f.status != "pass"]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> GpuMachine:
    return GpuMachine(tmp_path, monkeypatch)
