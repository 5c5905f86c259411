"""What a conversion writes: aside, on a disk that has room for it, of one type; nothing of it stays when it fails."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_dapo.actor.weights.hf_files import WeightsError, partial_folder
from megatron_dapo.config.base import ConfigError

COMPANIONS = "hf"
"""Folder in a converted checkpoint with the model's config and tokenizer, so that it converts back by itself."""

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
PLAIN_DTYPES = (*WEIGHT_DTYPES, torch.float16, torch.float64)


@contextmanager
def aside(target: Path, size: int) -> Iterator[Path]:
    """The folder that becomes `target`; not made yet.

    Args:
        size: bytes that will be written. A folder that stands at `target` keeps its own until the end.

    Raises:
        ConfigError: the disk has less room.
    """
    partial = partial_folder(target)
    shutil.rmtree(partial, ignore_errors=True)
    there = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise ConfigError(
            f"{target}: {size / 1e6:,.0f} MB are to be written, {free / 1e6:,.0f} MB are free in {there}; name a "
            "target on another disk"
        )
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def written_dtype(dtypes: Mapping[str, torch.dtype], source: Path, asked: torch.dtype | None) -> torch.dtype:
    """The type asked for, or else the one that all tensors have.

    Raises:
        WeightsError: they differ, or it is none that a model is trained in, or one holds no plain numbers (quantized
            weights mean nothing without their scales); with a tensor's name.
    """
    first = next(iter(dtypes.values()))
    for name, dtype in dtypes.items():
        where = f"{source}: tensor {name} has type {dtype}"
        if dtype not in PLAIN_DTYPES:
            raise WeightsError(f"{where}, as quantized weights have; give plain ones")
        if asked is None and dtype not in WEIGHT_DTYPES:
            raise WeightsError(f"{where}; give --dtype float32 or bfloat16")
        if asked is None and dtype != first:
            raise WeightsError(f"{where}, others {first}; give --dtype to make them one")
    return asked or first
