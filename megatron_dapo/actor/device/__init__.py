"""The one place that chooses the device and the kernels, and that makes Megatron-Core run without CUDA."""

import importlib
import importlib.util
import os
import warnings
from dataclasses import replace
from typing import Literal

import torch

from megatron_dapo.actor.device import cpu
from megatron_dapo.actor.device.kernel_choice import DeviceChoice, Dtype, Found, choose
from megatron_dapo.config.actor_config import ActorConfig

__all__ = ["DeviceChoice", "Found", "choose", "prepare", "prepare_for"]


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
    if config.device == "cpu" or not torch.cuda.is_available():
        seen = Found()
        choose(config, dtype, seen)  # what cannot be had is refused before anything is changed
        cpu.install()
    else:
        # Under Ray a process sees one GPU; under torchrun it sees all of its node's and LOCAL_RANK says which is its.
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        seen = Found(capability=torch.cuda.get_device_capability(index), index=index)
        _check_transformer_engine()
    with warnings.catch_warnings():
        # Megatron warns at import of what is not installed; the choice made here says it once, in its own words.
        warnings.simplefilter("ignore")
        from megatron.core.extensions.transformer_engine import HAVE_TE
        from megatron.core.utils import get_te_version

        from megatron_dapo.actor.device import adam
    found = replace(
        seen,
        transformer_engine=str(get_te_version()) if HAVE_TE else None,
        fused_adam=adam.fused_package(),
        gradient_accumulation=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    )
    choice = choose(config, dtype, found)
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
        raise RuntimeError(
            "TransformerEngine is installed but cannot be imported with torch "
            f"{torch.__version__}: {type(error).__name__}: {error}. Build it again for this torch (docs/guide.md, "
            "section 1), or uninstall transformer-engine: training then takes PyTorch's kernels"
        ) from error
