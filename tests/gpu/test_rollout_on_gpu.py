"""Weights by every way to a real server that shares the trainer's GPU, and what server and trainer then say of tokens.

Qwen2.5-0.5B's shape with random weights. The group is gloo's: NCCL refuses two processes on one GPU ("Duplicate GPU
detected"); `test_nccl_publish_on_gpu` needs two.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.fleet.fleet import RolloutFleet
from tests.gpu.place import DEVICE, answers, requests, serve
from tests.gpu.publishing import (
    BUCKET,
    CONTEXT,
    DTYPE,
    MEAN_GAP,
    RESPONSES,
    TOKENS,
    VOCABULARY,
    drawn_and_compared,
    publish_twice,
    save_qwen,
)
from tests.rollout.weights.memory_trainer import MemoryTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]


async def changes_published(fleet: RolloutFleet, folder: Path) -> dict[str, float]:
    """All at first, then three times 2% of the values. The fleet compares every checksum."""
    trainer, seconds = MemoryTrainer(folder, bucket_bytes=BUCKET, device=DEVICE), list[float]()
    for version in range(20, 24):
        if version > 20:
            trainer.change(0.02)
        began = time.monotonic()
        report = await fleet.publish_stream(trainer, version)
        seconds.append(time.monotonic() - began)
        assert report.by_disk == {}, report.by_disk
        assert (report.changed == 1.0) is (version == 20)
    return {"GB": trainer.sent[-1].bytes / 1e9, "s, all": seconds[0], "s, changes": min(seconds[1:])}


def test_weights_reach_a_server_by_every_way(
    on_device: Callable[..., Any], record: Callable[[str, Any], None], tmp_path
):
    folders = [save_qwen(tmp_path / f"model{seed}", seed) for seed in range(3)]

    async def work(fleet: RolloutFleet) -> None:
        await answers(fleet, requests(16, 16, vocabulary=VOCABULARY))  # kernels are made
        record("drawn with the weights of the start", await drawn_and_compared(fleet, on_device, folders[0]))
        began = time.monotonic()
        report = await fleet.publish(folders[1], 7)
        record("publish by disk", {"GB": report.bytes / 1e9, "s, with checksums": time.monotonic() - began})
        assert min(report.servers.values()) > 6
        for transport in ("tensor", "distributed"):
            found = await publish_twice(fleet, on_device, (folders[0], folders[2]), transport, "gloo")
            record(f"publish by {transport}" + (", gloo" if transport == "distributed" else ""), found)
            gap = await drawn_and_compared(fleet, on_device, folders[2])
            record(f"drawn after {transport}", gap)
            assert gap["mean gap"] < MEAN_GAP
        record("publish by delta, gloo", await changes_published(fleet, folders[2]))

    tokens = 16384 if DTYPE == "float32" else RESPONSES * (TOKENS + 128)
    sizes = {"vocabulary": VOCABULARY, "context": CONTEXT, "max_running_requests": RESPONSES, "kv_cache_tokens": tokens}
    sizes["weight_sync"] = "delta"  # as servers of the other ways, with a loader more
    serve(folders[0], tmp_path / "server.log", DTYPE, work, **sizes)
