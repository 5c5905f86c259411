"""A server in FP8: weights by every way, verified, again and again; and how far its log-probs are from the trainer's.

Two gaps are recorded. That to the trainer of the plain weights is what a run corrects for. That to a trainer of the
rounded weights has only the activations' rounding left: were a scale wrong, it would be the larger one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.config import QUANTIZATION
from rollout.fleet.fleet import RolloutFleet
from tests.gpu.place import ON_CPU, serve
from tests.gpu.publishing import (
    BUCKET,
    CONTEXT,
    DTYPE,
    RESPONSES,
    TOKENS,
    VOCABULARY,
    actor_of,
    drawn_and_compared,
    publish_twice,
    save_qwen,
)
from tools.rank_pool import RankPlace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(480),
    pytest.mark.skipif(ON_CPU, reason="SGLang multiplies in FP8 on GPUs alone"),
]
LARGEST_GAP = 0.2
"""Nats, the mean."""


def write(place: RankPlace, folder: Path, target: Path) -> int:
    """The folder's weights as a run writes them for FP8 servers; how many checksums there are."""
    from megatron_dapo.cluster.rank_weights import RankWeights
    from rollout.wire.client import ServerInfo

    actor = actor_of(place, folder)
    info = ServerInfo(device="cuda", dtype=DTYPE, tensor_parallel=1)
    checksums = RankWeights(actor, bucket_bytes=BUCKET, quantization=QUANTIZATION).write(target, [info])
    return len(checksums[info][0])


def rounded(folder: Path, target: Path) -> Path:
    """The FP8 weights of a folder as plain ones: products with their scales."""
    tensors = load_file(folder / "model.safetensors")
    plain = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            tensor = tensor.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        if not name.endswith("_scale_inv"):
            plain[name] = tensor.to(torch.bfloat16)
    target.mkdir()
    save_file(plain, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_an_fp8_server_gets_weights_by_every_way(
    on_device: Callable[..., Any], record: Callable[[str, Any], None], tmp_path: Path
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(
            "on Blackwell SGLang changes the scales after it has loaded them; before Hopper it has other kernels"
        )
    folders = [save_qwen(tmp_path / f"model{seed}", seed) for seed in range(3)]
    fp8 = tmp_path / "fp8"
    assert on_device(write, folders[1], fp8) > 6
    products = rounded(fp8, tmp_path / "rounded")

    async def work(fleet: RolloutFleet) -> None:
        report = await fleet.publish(fp8, 7)
        record("FP8, publish by disk: checksums", min(report.servers.values()))
        record("FP8, publish by disk: GB", report.bytes / 1e9)
        for name, trainer in (("plain", folders[1]), ("rounded", products)):
            gap = await drawn_and_compared(fleet, on_device, trainer)
            record(f"FP8 server, trainer with the {name} weights", gap)
            assert 0 < gap["mean gap"] < LARGEST_GAP
        for transport in ("tensor", "distributed"):
            found = await publish_twice(fleet, on_device, (folders[0], folders[2]), transport, "gloo", QUANTIZATION)
            record(f"FP8, publish by {transport}", found)
            gap = await drawn_and_compared(fleet, on_device, folders[2])
            record(f"FP8, drawn after {transport}", gap)
            assert 0 < gap["mean gap"] < LARGEST_GAP
        report = await fleet.publish(fp8, 8)
        assert min(report.servers.values()) > 6, "a folder after memory"

    sizes = {"vocabulary": VOCABULARY, "context": CONTEXT, "max_running_requests": RESPONSES}
    sizes["kv_cache_tokens"] = RESPONSES * (TOKENS + 128)
    serve(folders[0], tmp_path / "server.log", DTYPE, work, quantization="fp8", **sizes)
