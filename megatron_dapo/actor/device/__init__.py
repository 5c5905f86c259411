"""The one place that chooses the device and the kernels, and that makes Megatron-Core run without CUDA."""

import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from megatron_dapo.actor.device import cpu, weight_gradients
from megatron_dapo.config.actor_config import ActorConfig

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What this process can see and import."""

    index: int | None = None
    """Of its CUDA device; None: there is none."""

    transformer_engine: str | None = None
    """Version, if Megatron can import it."""

    fused_adam: str | None = None
    """Package of the FusedAdam that Megatron has imported: transformer_engine or apex."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChoice:
    """What the trainer processes run on."""

    device: torch.device
    backend: Literal["gloo", "nccl"]
    """torch.distributed backend of every group of model ranks."""

    transformer_engine: bool = False
    """The model is built from TransformerEngine's layers (Megatron's TE layer spec)."""

    fused_adam: bool = False
    """The optimizer is TransformerEngine's or Apex's; else `device.adam.FusedLayoutAdam`."""

    gradient_accumulation: bool = False
    """The matrix product itself adds weight gradients to their float32 buffer (`device.weight_gradients`); else each
    micro-batch's is rounded to the weights' type before."""

    overlap_grad_reduce: bool = False
    """Gradients are summed over ranks while backward still runs; and the distributed optimizer's weights are gathered
    while the next forward runs."""

    kernels: Mapping[str, str] = field(default_factory=dict)
    """For each part of the work what does it: {"optimizer": "FusedAdam of apex"}."""


def prepare(device: Literal["auto", "cpu", "cuda"]) -> DeviceChoice:
    """`prepare_for` a config that asks for a device and nothing else."""
    return prepare_for(ActorConfig(device=device), "bfloat16")


def prepare_for(config: ActorConfig, dtype: Dtype) -> DeviceChoice:
    """Choose device and kernels and make Megatron importable; call before the process first imports Megatron.

    On the CPU this installs the stand-ins of `device.cpu`; with CUDA these stay out. The optimizer is
    TransformerEngine's or Apex's FusedAdam where Megatron finds one, else `device.adam.FusedLayoutAdam`. A second
    call that asks the same changes nothing.

    Raises:
        ValueError: CUDA or FP8 was asked for and cannot be had.
        RuntimeError: the CPU is chosen and Megatron is already imported without the stand-ins; or CUDA, and
            TransformerEngine is installed but cannot be imported.
    """
    # Megatron warns about sequence parallelism on every layer without it; CUDA reads it when its context is created.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("NVTE_TENSOR_HANDLE_POOL_SIZE_MB", "128")  # 2.19's FusedAdam takes all experts' at once
    index = None
    if config.device == "cpu" or not torch.cuda.is_available():
        choose(config, dtype, Found())  # what cannot be had is refused before anything is changed
        cpu.install()
    else:
        # Under Ray a process sees one GPU; under torchrun it sees all of its node's and LOCAL_RANK says which is its.
        torch.cuda.set_device(index := int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        _check_transformer_engine()
    sys.modules[weight_gradients.NAME] = weight_gradients
    with warnings.catch_warnings():
        # Megatron warns at import of what is not installed; the choice made here says it once, in its own words.
        warnings.simplefilter("ignore")
        from megatron.core.extensions.transformer_engine import HAVE_TE
        from megatron.core.utils import get_te_version

        from megatron_dapo.actor.device import adam
    engine = str(get_te_version()) if HAVE_TE else None
    choice = choose(config, dtype, Found(index=index, transformer_engine=engine, fused_adam=adam.fused_package()))
    if not choice.fused_adam:
        adam.put_in_place()
    return choice


def _check_transformer_engine() -> None:
    """Megatron takes one that cannot be imported for an absent one in some places, and stumbles over it in others."""
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # libraries, versions, CUDA: each of its checks fails in a way of its own
        why = f"{torch.__version__}: {type(error).__name__}: {error}"
        remedy = "or uninstall transformer-engine: training then takes PyTorch's kernels"
        how = f"Build it again for this torch (docs/guide.md, section 1), {remedy}"
        raise RuntimeError(f"TransformerEngine is installed but cannot be imported with torch {why}. {how}") from error


def choose(config: ActorConfig, dtype: Dtype, found: Found) -> DeviceChoice:
    """The device, and for each part of the work the fastest kernels that are there and that it can use: a
    pure function, without Megatron.

    Raises:
        ValueError: CUDA, FP8 or context parallelism is asked for and cannot be had; the message names the key and
            what is missing.
    """
    if config.device == "cuda" and found.index is None:
        raise ValueError("actor.device = cuda: no CUDA device is visible to this process; use auto or cpu")
    index = None if config.device == "cpu" else found.index
    cuda = index is not None
    overlaps = cuda if config.overlap is None else config.overlap
    why_not = None  # TransformerEngine's layers are used
    if not cuda:
        why_not = "no CUDA device is used"
    elif found.transformer_engine is None:
        why_not = "TransformerEngine is not importable"
    elif dtype == "float32":
        why_not = "TransformerEngine's attention has no packed sequences in float32"
    if config.fp8 != "none" and why_not is not None:
        remedy = "install transformer-engine[pytorch] on a machine with such a GPU and train in bfloat16"
        why = f"FP8 runs in TransformerEngine's layers on CUDA, and {why_not}"
        raise ValueError(f"actor.fp8 = {config.fp8}: {why}; set actor.fp8 to none, or {remedy}")
    if cuda and config.layout.context > 1 and dtype == "bfloat16" and why_not is not None:
        needs = f"on CUDA this needs TransformerEngine's attention, and {why_not}"
        other = "PyTorch's would take a mask of each sequence's tokens by its tokens"
        remedy = "Install transformer-engine[pytorch], or set actor.layout.context to 1"
        raise ValueError(f"actor.layout.context = {config.layout.context}: {needs}; {other}. {remedy}")
    ranks, lora = config.layout.data * config.layout.context, config.lora.rank > 0
    backend: Literal["gloo", "nccl"] = "nccl" if cuda else "gloo"
    fused_adam = found.fused_adam if cuda else None
    reduces_late = not overlaps or ranks == 1 or lora
    # The gradient of a weight with an adapter is not kept, and an adapter's comes from it, in no order.
    accumulates = dtype == "bfloat16" and not lora
    optimizer = f"FusedAdam of {fused_adam}" if fused_adam else "AdamW of this package"
    if config.optimizer.compact != "none" and fused_adam != "transformer_engine":
        why = "this is done by TransformerEngine's FusedAdam on CUDA, which is not there"
        remedy = "set it to none, or install transformer-engine[pytorch] on such a machine"
        raise ValueError(f"actor.optimizer.compact = {config.optimizer.compact}: {why}; {remedy}")
    if cuda and config.optimizer.on_cpu:
        optimizer = f"PyTorch's AdamW on the CPU, {config.threads} threads"
    local = f"PyTorch's attention on packed sequences, RMSNorm in PyTorch ({why_not})"
    kernels = {
        "layers": local if why_not else f"TransformerEngine {found.transformer_engine}",
        "matrix products": dtype if config.fp8 == "none" else f"FP8 {config.fp8}, {config.fp8_recipe} scaling",
        "gradient accumulation": "in the matrix product" if accumulates else "an addition after the matrix product",
        "gradient reduction": f"{'after' if reduces_late else 'during'} backward ({backend}, {ranks} data-parallel)",
        "optimizer": optimizer,
    }
    return DeviceChoice(
        device=torch.device("cpu") if index is None else torch.device("cuda", index),
        backend=backend,
        transformer_engine=why_not is None,
        fused_adam=fused_adam is not None,
        gradient_accumulation=accumulates,
        overlap_grad_reduce=not reduces_late,
        kernels=kernels,
    )
