"""The machine and its packages: each compiled package is imported and used once, in a process of its own."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.place import DEVICE, ON_CPU

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]

PACKAGES = (
    *("torch", "triton", "megatron-core", "transformer-engine", "transformer-engine-torch", "apex", "sglang"),
    *("sglang-kernel", "flashinfer-python", "torch-memory-saver", "ray", "transformers", "numpy"),
)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def test_the_machine(record: Callable[[str, Any], None]) -> None:
    record("versions", {"python": platform.python_version()} | {name: version(name) for name in PACKAGES})
    record("host", {"cores": os.cpu_count(), "GiB": round(os.sysconf("SC_PHYS_PAGES") * 4096 / 2**30)})
    record("compilers", {name: shutil.which(name) or "none" for name in ("nvcc", "g++", "ninja")})
    if ON_CPU:
        return
    names = "name,driver_version,memory.total,memory.used"
    asked = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    values = dict(zip(names.split(","), map(str.strip, lines[0].split(",")), strict=True))
    record("GPU", values.pop("name") + (f", {len(lines)} of them" if len(lines) > 1 else ""))
    record("nvidia-smi", values)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    record("CUDA", {"torch was built for": torch.version.cuda, "capability": capability, "NCCL": nccl})


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_a_matrix_product_is_right(dtype: str, near: float) -> None:
    """Without TF32, which torch leaves out of matrix products unless it is asked for."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator).to(getattr(torch, dtype)) for _ in range(2))
    wanted = left.double() @ right.double()
    got = (left.to(DEVICE) @ right.to(DEVICE)).double().cpu()
    assert (got - wanted).norm() < near * wanted.norm()


USES = {
    "triton": """
        import triton, triton.language as tl
        @triton.jit
        def add(x, y, out, size: tl.constexpr):
            at = tl.arange(0, size)
            tl.store(out + at, tl.load(x + at) + tl.load(y + at))
        x, y = torch.randn(128, device="cuda"), torch.randn(128, device="cuda")
        out = torch.empty_like(x)
        add[(1,)](x, y, out, size=128)
        assert torch.equal(out, x + y)
    """,
    "sgl_kernel": """
        import sgl_kernel
        x, weight = torch.randn(8, 256, device="cuda").bfloat16(), torch.ones(256, device="cuda").bfloat16()
        out = torch.empty_like(x)
        torch.ops.sgl_kernel.rmsnorm.default(out, x, weight, 1e-6, True)
        wanted = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        assert (out.float() - wanted).norm() < 0.01 * wanted.norm()
    """,
    "flashinfer": "import flashinfer.norm, flashinfer.sampling",
    "torch_memory_saver": """
        from torch_memory_saver import torch_memory_saver
        assert hasattr(torch_memory_saver, "pause")
    """,
    "sglang": "import sglang.srt.entrypoints.http_server, sglang.srt.models.qwen2, sglang.srt.models.qwen3",
    "megatron": "import megatron.core.models.gpt, megatron.core.optimizer, megatron.core.dist_checkpointing",
    "ray": "import ray",
    "transformer_engine": """
        import transformer_engine.pytorch as te
        linear = te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16, device="cuda")
        x = torch.randn(32, 256, device="cuda").bfloat16()
        out = linear(x)
        out.float().sum().backward()
        wanted = x @ linear.weight.T
        assert (out - wanted).float().norm() < 0.02 * wanted.float().norm()
        assert linear.weight.grad is not None
    """,
    "nccl": """
        import torch.distributed as dist
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", init_method=f"file://{FOLDER}/meet", rank=0, world_size=1)
        x = torch.arange(4.0, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        assert x.tolist() == [0, 1, 2, 3]
        dist.destroy_process_group()
    """,
}
OPTIONAL = {"transformer_engine": "without it: Megatron's local layers, no FP8, no context parallelism on CUDA"}
NOT_ON_A_CPU = ("triton", "sgl_kernel", "flashinfer", "torch_memory_saver", "sglang", "nccl", "transformer_engine")


@pytest.mark.parametrize("package", USES)
def test_a_package_is_there_and_works(package: str, tmp_path: Path) -> None:
    if ON_CPU and package in NOT_ON_A_CPU:
        pytest.skip("computes on a GPU")
    if package in OPTIONAL and importlib.util.find_spec(package) is None:
        pytest.skip(f"not installed; {OPTIONAL[package]}")
    script = tmp_path / "use.py"  # Triton reads the source of its kernels
    lines = USES[package].strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    head = ["import torch", f"FOLDER = {str(tmp_path)!r}"]
    script.write_text("\n".join([*head, *(line[indent:] for line in lines)]) + "\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, f"code {done.returncode}\n{done.stderr[-1500:]}"


def test_apex_of_the_package_index_is_not_installed() -> None:
    """PyPI's `apex` is another project; Megatron takes any module of that name for NVIDIA's."""
    if importlib.util.find_spec("apex") is not None:
        assert importlib.util.find_spec("apex.optimizers") is not None, "remove this apex: it is not NVIDIA's"
