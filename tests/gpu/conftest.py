"""Tests that need one CUDA device: skipped without one. Figures go to the JSON file that GPU_FIGURES names."""

import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dapo.actor.ranks import RankPool
from tests.actor.gloo import end_workers, run_ranks


@pytest.fixture(autouse=True)
def _needs_cuda() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible to this process")
    yield
    # What this process keeps, the rank processes and servers of the next test could not have.
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def cuda() -> Iterator[Callable[..., Any]]:
    """`cuda(function, *args, timeout_s=...)`: the result of `function(place, *args)` in a process of one CUDA rank."""
    with RankPool("cuda") as pool:
        yield lambda function, *args, timeout_s=300: pool.run(1, function, *args, timeout_s=timeout_s)[0]


@pytest.fixture(scope="session")
def gloo() -> Iterator[Callable[..., Any]]:
    """`gloo(n, function, *args)`: the same on n ranks of the CPU."""
    yield run_ranks
    end_workers()


@pytest.fixture(scope="session")
def record() -> Callable[[str, Any], None]:
    """`record(name, value)`: prints a figure and writes all of them so far, so that a later failure loses none."""
    target = os.environ.get("GPU_FIGURES")
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    figures["torch"] = torch.__version__

    def write(name: str, value: Any) -> None:
        figures[name] = value
        print(f"{name}: {json.dumps(value)}")
        if target:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_text(json.dumps(figures, indent=1))

    return write
