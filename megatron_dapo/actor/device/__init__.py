"""The one place that chooses the device and the kernels, and that makes Megatron-Core run without CUDA."""

import os
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_dapo.actor.device import cpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """Which implementation does one part of the work, and why this one.

    Example: Kernel(part="norm", name="RMSNorm in PyTorch", reason="TransformerEngine is not importable").
    """

    part: Literal["attention", "norm", "optimizer"]
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChoice:
    """What the trainer processes run on; `str()` gives the lines for the start of a run."""

    device: torch.device
    backend: Literal["gloo", "nccl"]
    """torch.distributed backend of every group of model ranks."""

    transformer_engine: bool
    """The model is built from TransformerEngine's layers (Megatron's TE layer spec)."""

    kernels: tuple[Kernel, ...]

    def __str__(self) -> str:
        lines = [f"device {self.device}, torch.distributed over {self.backend}"]
        lines += [f"{kernel.part}: {kernel.name} ({kernel.reason})" for kernel in self.kernels]
        return "\n".join(lines)


def prepare(device: Literal["auto", "cpu", "cuda"]) -> DeviceChoice:
    """Choose the device and make Megatron importable on it; call before the process first imports Megatron.

    On the CPU this installs the stand-ins of `device.cpu`; with CUDA these stay out. The optimizer is
    TransformerEngine's or Apex's FusedAdam where Megatron finds one, else `device.adam.FusedLayoutAdam`. A second
    call with the same device changes nothing.

    Raises:
        ValueError: `cuda` was asked for and no CUDA device is visible.
        RuntimeError: the CPU is chosen and Megatron is already imported without the stand-ins.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("actor.device = cuda: no CUDA device is visible to this process; use auto or cpu")
    # Megatron warns about sequence parallelism on every layer without it; CUDA reads it when its context is created.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device == "cpu" or not torch.cuda.is_available():
        cpu.install()
        return _describe(torch.device("cpu"))
    # Under Ray a process sees one GPU; under torchrun it sees all of its node's and LOCAL_RANK says which is its own.
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return _describe(torch.device("cuda", index))


def _describe(device: torch.device) -> DeviceChoice:
    with warnings.catch_warnings():
        # Megatron warns at import of what is not installed; the choice made here says it once, in its own words.
        warnings.simplefilter("ignore")
        from megatron.core.extensions.transformer_engine import HAVE_TE

        from megatron_dapo.actor.device import adam

    transformer_engine = HAVE_TE and device.type == "cuda"
    if transformer_engine:
        reason = "TransformerEngine is importable"
        attention = Kernel(part="attention", name="TransformerEngine's dot-product attention", reason=reason)
        norm = Kernel(part="norm", name="TransformerEngine's RMSNorm, fused with the linear after it", reason=reason)
    else:
        reason = "no CUDA device is used" if device.type == "cpu" else "TransformerEngine is not importable"
        attention = Kernel(
            part="attention", name="PyTorch's scaled_dot_product_attention on packed sequences", reason=reason
        )
        norm = Kernel(part="norm", name="RMSNorm in PyTorch", reason=reason)
    optimizer = Kernel(part="optimizer", **adam.choose(device))
    return DeviceChoice(
        device=device,
        backend="gloo" if device.type == "cpu" else "nccl",
        transformer_engine=transformer_engine,
        kernels=(attention, norm, optimizer),
    )
