"""Weights on a GPU are hashed there, and the host waits once for all of a bucket."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from rollout.weights.checksums import ChecksumStream, expected_checksums
from rollout.wire.client import ServerInfo
from tests.emulated.strict_ranks import GPU
from tests.rollout.folders import save_model
from tools.rank_pool import RankPlace

SERVERS = ServerInfo(device="cuda", dtype="bfloat16", tensor_parallel=2)
LEAVES_THE_DEVICE = ("tolist", "item", "cpu", "numpy", "__int__", "__float__", "__bool__", "__index__", "__contains__")
BUCKETS = 4


class Waits(TorchFunctionMode):
    """Notes what makes the host wait for a device, and where `to` moves tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LEAVES_THE_DEVICE or (name == "to" and isinstance(args[1], str | torch.device)):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def hashed(place: RankPlace, folder: Path) -> tuple[Any, list[str]]:
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: each.to(GPU) for name, each in load_file(folder / "model.safetensors").items()}
    names = list(tensors)
    with ChecksumStream(config, names, [SERVERS]) as stream, Waits() as waits:
        for at in range(BUCKETS):
            stream.add({name: tensors[name] for name in names[at::BUCKETS]})
            stream.flush()
        return stream.finish()[SERVERS], waits.seen


def test_the_host_waits_once_a_bucket(strict, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2", seed=3, num_hidden_layers=2)
    ((checksums, waits),) = strict(1, hashed, tmp_path)
    assert checksums == expected_checksums(tmp_path, SERVERS)
    assert waits == ["tolist"] * BUCKETS
