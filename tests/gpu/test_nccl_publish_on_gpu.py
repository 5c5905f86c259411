"""Weights by NCCL from a trainer on one GPU to a server on another, twice in a row. Needs two GPUs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.fleet.fleet import RolloutFleet
from tests.gpu.place import ON_CPU, answers, requests, serve
from tests.gpu.publishing import (
    CONTEXT,
    DTYPE,
    MEAN_GAP,
    RESPONSES,
    VOCABULARY,
    drawn_and_compared,
    publish_twice,
    save_qwen,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(220)]


@pytest.mark.skipif(ON_CPU or torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each process")
def test_weights_reach_a_server_by_nccl(
    on_device: Callable[..., Any], record: Callable[[str, Any], None], tmp_path: Path
) -> None:
    start, first, second = (save_qwen(tmp_path / f"model{seed}", seed) for seed in range(3))

    async def work(fleet: RolloutFleet) -> None:
        await answers(fleet, requests(16, 16, vocabulary=VOCABULARY))
        record("publish by NCCL", await publish_twice(fleet, on_device, (first, second), "distributed", "nccl"))
        gap = await drawn_and_compared(fleet, on_device, second)
        record("drawn after NCCL", gap)
        assert gap["mean gap"] < MEAN_GAP

    sizes: dict[str, Any] = {"kv_cache_tokens": None, "memory_fraction": 0.8, "max_running_requests": RESPONSES}
    serve(start, tmp_path / "server.log", DTYPE, work, vocabulary=VOCABULARY, context=CONTEXT, gpus=("1",), **sizes)
