"""Weights by NCCL from a trainer on one GPU to a server on another, twice in a row. Needs two GPUs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dapo.cluster.engines import visible_gpus
from rollout.config import RolloutConfig
from rollout.fleet.fleet import RolloutFleet
from rollout.server.engine import group_environment
from tests.gpu.place import DEVICE, ON_CPU, answers, requests, serve
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
from tools.rank_pool import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(220)]


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """As `on_device`, with NCCL's variables of a trainer rank, which both ends must have alike."""
    for name, value in group_environment(RolloutConfig(), own_gpus=True).items():
        monkeypatch.setenv(name, value)
    with RankPool(DEVICE) as pool:
        yield lambda function, *args, ranks=1, timeout_s=120: pool.run(ranks, function, *args, timeout_s=timeout_s)[0]


@pytest.mark.skipif(ON_CPU or torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each process")
def test_weights_reach_a_server_by_nccl(
    sender: Callable[..., Any], record: Callable[[str, Any], None], tmp_path: Path
) -> None:
    start, first, second = (save_qwen(tmp_path / f"model{seed}", seed) for seed in range(3))

    async def work(fleet: RolloutFleet) -> None:
        await answers(fleet, requests(16, 16, vocabulary=VOCABULARY))
        record("publish by NCCL", await publish_twice(fleet, sender, (first, second), "distributed", "nccl"))
        gap = await drawn_and_compared(fleet, sender, second)
        record("drawn after NCCL", gap)
        assert gap["mean gap"] < MEAN_GAP

    sizes: dict[str, Any] = {"kv_cache_tokens": None, "memory_fraction": 0.8, "max_running_requests": RESPONSES}
    gpus = visible_gpus(2)[1:]
    serve(start, tmp_path / "server.log", DTYPE, work, vocabulary=VOCABULARY, context=CONTEXT, gpus=gpus, **sizes)
