"""Tests for one CUDA device or more: skipped without one, unless GPU_TESTS_DEVICE=cpu. `tests/gpu/runner` runs them."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.actor.gloo import end_workers, run_ranks
from tests.gpu.place import DEVICE, ON_CPU
from tests.gpu.runner.recorder import record
from tools.rank_pool import RankPool

__all__ = ["record"]  # pytest finds the fixture by its import


@pytest.fixture(autouse=True)
def _needs_device(request: pytest.FixtureRequest) -> Iterator[None]:
    on_gpu = not ON_CPU and request.node.get_closest_marker("gpu") is not None
    if on_gpu and not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible to this process")
    yield
    if on_gpu:
        # What this process keeps, the rank processes and servers of the next test could not have.
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def on_device() -> Iterator[Callable[..., Any]]:
    """`on_device(function, *args, ranks=1, timeout_s=...)`: the result of rank 0 of `function(place, *args)` in
    processes of the device, one GPU each. A rank whose call failed is replaced: a CUDA error ends with it."""
    with RankPool(DEVICE) as pool:
        yield lambda function, *args, ranks=1, timeout_s=120: pool.run(ranks, function, *args, timeout_s=timeout_s)[0]


@pytest.fixture(scope="session")
def gloo() -> Iterator[Callable[..., Any]]:
    """`gloo(n, function, *args)`: the same on n ranks of the CPU; the results of all."""
    yield run_ranks
    end_workers()
