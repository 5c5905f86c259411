"""A made-up GPU node: files, programs and Python packages in a folder. A test takes one thing away, or breaks it."""

import resource
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dapo.doctor.examine import examine_gpu_node
from megatron_dapo.doctor.hardware import probe_gpus
from megatron_dapo.doctor.probing import Finding, Node, Status

GPU = "NVIDIA H100 80GB HBM3, 81559, 4, 580.65.06, Default, Disabled, 0"
NVIDIA_SMI = """#!/bin/sh
case "$*" in
*topo*) printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n' ;;
*) for gpu in 0 1 2 3 4 5 6 7; do echo "{gpu}"; done ;;
esac
"""
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
    def is_available():
        return True

    def device_count():
        return 8

    class nccl:
        def version():
            return (2, 28, 9)
"""
NO_DRIVER = TORCH.replace("return True", "return False") + (
    "\n    def init():\n        raise RuntimeError('Error 802: system not yet initialized')\n"
)
MODULES = {
    "torch": TORCH,
    "megatron.core": "",
    "transformer_engine.pytorch": "",
    "sgl_kernel": "",
    "flashinfer": "",
    "torch_memory_saver.utils": "def get_binary_path_from_package(stem):\n    return stem\n",
    "sglang.srt.entrypoints.http_server": "",
}
PACKAGES = {
    "torch": "2.11.0",
    "nvidia-nccl-cu13": "2.28.9",
    "sglang-kernel": "0.4.5",
    "flashinfer-python": "0.6.15.post1",
    "torch-memory-saver": "0.0.10",
}
SGLANG = """Metadata-Version: 2.1
Name: sglang
Version: 0.5.17
Requires-Dist: torch==2.11.0
Requires-Dist: sglang-kernel==0.4.5
Requires-Dist: flashinfer_python[cu13]==0.6.15.post1
Requires-Dist: torch_memory_saver>=0.0.9.post1
Requires-Dist: torch==2.9; extra == "other"
Requires-Dist: pillow
"""


class GpuMachine:
    """Eight H100s where every check passes, below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.programs, self.site = root, root / "bin", root / "site"
        self.cuda = root / "usr/local/cuda"
        for name, text in {
            "sys/class/net/lo/operstate": "unknown\n",
            "sys/class/net/eth0/operstate": "up\n",
            "sys/class/net/ib0/operstate": "up\n",
            "sys/class/net/docker0/operstate": "down\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
            "dev/infiniband/uverbs0": "",
            "dev/shm/taken": "",
            "include/Python.h": "",
            "usr/local/cuda/include/cuda_runtime.h": "",
            "usr/local/cuda/lib64/libcudart.so": "",
        }.items():
            self.write(name, text)
        self.program("nvidia-smi", NVIDIA_SMI.format(gpu=GPU))
        self.program("gcc", GCC)
        self.program("c++", "#!/bin/sh\n")
        self.program("ninja", "#!/bin/sh\n")
        self.program("nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n", self.cuda / "bin")
        self.program("python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', root / "venv/bin")
        for module, code in MODULES.items():
            self.module(module, code)
        for package, version in PACKAGES.items():
            self.package(package, version)
        self.write("site/sglang-0.5.17.dist-info/METADATA", SGLANG)
        self.node = Node(
            root=root,
            environment={"PATH": str(self.programs), "PYTHONPATH": str(self.site)},
            python=(str(root / "venv/bin/python"), "-S"),  # without this environment's own packages
            headers=root / "include",
            site=self.site,
            packages=[str(self.site)],
            host="node7",
            resolve=lambda name: "10.0.0.7",
            outgoing=lambda: "10.0.0.7",
            locked_memory=resource.RLIM_INFINITY,
        )

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def program(self, name: str, script: str, folder: Path | None = None) -> None:
        path = (folder or self.programs) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def module(self, name: str, code: str) -> None:
        self.write(f"site/{name.replace('.', '/')}/__init__.py", code)

    def package(self, name: str, version: str | None) -> None:
        """Installed in that version; None: not installed."""
        stem = name.replace("-", "_")
        for other in self.site.glob(f"{stem}-*.dist-info"):
            shutil.rmtree(other)
        if version is not None:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            self.write(f"site/{stem}-{version}.dist-info/METADATA", metadata)

    def gpus(self, line: str) -> None:
        """What nvidia-smi says of each."""
        self.program("nvidia-smi", NVIDIA_SMI.format(gpu=line))

    def set(self, **variables: str) -> None:
        self.node = replace(self.node, environment={**self.node.environment, **variables})

    def examine(self, config=None) -> list[Finding]:
        return list(examine_gpu_node(config, probe_gpus(self.node)[0], self.node))

    def problems(self, config=None) -> list[tuple[Status, str, str]]:
        """(status, check, found) of all that does not pass."""
        return [(f.status, f.check, f.found) for f in self.examine(config) if f.status is not Status.PASS]


@pytest.fixture
def machine(tmp_path) -> GpuMachine:
    return GpuMachine(tmp_path)
