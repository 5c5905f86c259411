"""How long a publish takes: a model of two trainer ranks into two receivers, against a plain copy of its bytes.

`python -m tests.cluster.measure_publish FOLDER [--gigabytes 1] [--bucket-mb 256] [--pipeline]`: TP 2, or PP 2. The
receivers are those of tests/rollout/peer.py, that keep what they are sent in memory. Each transport is used nine times,
in turn with one bucket at a time and with two in flight; medians without the first, in which `delta` sends all values.
Before each other one 3% of them have changed.
"""

import argparse
import contextlib
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollout.weights.transport import SendRequest, Target
from rollout.wire.client import ServerInfo
from tests.actor.gloo import run_ranks
from tests.actor.tiny import save_tiny
from tests.processes import ROOT
from tools.rank_pool import RankPlace

INFO = ServerInfo(device="cpu", dtype="float32", tensor_parallel=1)
LABELS, SHARE = "123456789", 0.03
HIDDEN, MLP, VOCABULARY, SERVERS = 1024, 4096, 32000, 2
LAYER = 4 * (2 * HIDDEN * HIDDEN + HIDDEN * HIDDEN + 3 * HIDDEN * MLP)


def save_model(folder: Path, gigabytes: float) -> Path:
    layers = max(1, round((gigabytes * 1e9 - 8 * VOCABULARY * HIDDEN) / LAYER))
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": layers, "vocab_size": VOCABULARY}
    return save_tiny(folder, "qwen2", tied=False, **sizes, num_attention_heads=16, num_key_value_heads=8)


def timed(place: RankPlace, requests: Sequence[SendRequest], kinds: Sequence[ServerInfo], *what: Any) -> list[float]:
    from megatron_dapo.cluster.rank_weights import RankWeights
    from rollout.weights.sender import WeightSender
    from tests.coordinator import sync_kit

    seconds: list[float] = []
    overlapped = WeightSender.put

    def alone(sender: WeightSender, *what: Any) -> None:
        overlapped(sender, *what)
        sender._under_way.result()

    class Timed(RankWeights):
        def send(self, request: SendRequest, *arguments: Any) -> Any:
            if request.transport == "delta":
                change(self._actor)
            WeightSender.put = overlapped if len(seconds) % 2 else alone  # type: ignore[method-assign]
            began = time.monotonic()
            sent = super().send(request, *arguments)
            seconds.append(time.monotonic() - began)
            assert sent is None or sent.failures == {}
            if sent is not None and request.label == LABELS[-1]:
                print(f"{request.transport}: {sent.bytes / 1e9:.3f} GB sent, {sent.changed:.1%} of the values")
            return sent

    import megatron_dapo.cluster.rank_weights as module

    module.RankWeights = Timed  # type: ignore[misc]
    folder, bucket, layout = what
    sync_kit.send(place, folder, requests, kinds, bucket, layout=layout)
    module.RankWeights = RankWeights  # type: ignore[misc]
    return seconds


def change(actor: Any) -> None:
    for chunk in actor._chunks:
        for parameter in chunk.parameters():
            parameter.data.view(-1)[torch.rand(parameter.numel()) < SHARE] += 1e-3


@contextlib.contextmanager
def receivers(root: Path) -> Iterator[list[Target]]:
    folders = [root / f"receiver{number}" for number in range(SERVERS)]
    processes = []
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            processes.append(subprocess.Popen([sys.executable, "-m", __spec__.name, "receive", str(folder)], cwd=ROOT))
        while not all((folder / "port").exists() for folder in folders):
            time.sleep(0.1)
        ports = [(folder / "port").read_text() for folder in folders]
        yield [Target(url=f"http://127.0.0.1:{port}", info=INFO, restarts=0, index=at) for at, port in enumerate(ports)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def receive(folder: Path) -> None:
    import asyncio

    import torch.distributed as dist

    from rollout.weights.changes import decode
    from tests.rollout import peer

    class Peer(peer.Peer):
        latest_s = 0.0

        def put_in_place(self, told: dict[str, Any], data: torch.Tensor) -> dict[str, torch.Tensor]:
            """As a server does."""
            sizes = [math.prod(shape) for _, shape in told["tensors"]]
            values = decode(data, told["counts"], sum(sizes), getattr(torch, told["dtype"])).split(sizes)
            for (name, _), part in zip(told["tensors"], values, strict=True):
                held = self.whole[name].view(-1)
                held.copy_(torch.where(part.isnan(), held, part))
            return {name: self.whole[name] for name, _ in told["tensors"]}

    peer.save_file = lambda *_: None  # type: ignore[assignment]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    asyncio.run(peer.serve(Peer(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--pipeline", action="store_true", help="two stages, each of which sends its part")
    given = parser.parse_args()
    layout = {"pipeline" if given.pipeline else "tensor": 2}
    model = save_model(given.folder / "model", given.gigabytes)
    size = (model / "model.safetensors").stat().st_size
    source = torch.zeros(size, dtype=torch.uint8)
    target, copies = torch.zeros_like(source), []
    for _ in range(5):
        began = time.monotonic()
        target.copy_(source)
        copies.append(time.monotonic() - began)
    del source, target
    copy_s = sorted(copies)[2]
    print(f"{size / 1e9:.2f} GB, a plain copy {copy_s:.2f} s")
    for hashed in (True, False):
        for transport in ("tensor", "distributed", "delta"):
            with receivers(given.folder / f"{transport}-{hashed}") as targets:
                common = {"deadline_s": 300.0, "backend": "gloo", "api_key_file": None, "transport": transport}
                requests = [
                    SendRequest(targets=tuple(replace(target, holds=held) for target in targets), label=label, **common)
                    for held, label in itertools.pairwise("0" + LABELS)
                ]
                kinds = [INFO] if hashed else []
                how = model, given.bucket_mb << 20, layout
                first, *_ = run_ranks(2, timed, requests, kinds, *how, timeout_s=900)
            both, one = (statistics.median(first[at::2]) for at in (1, 2))
            what = "hashed (SHA-256)" if hashed else "not hashed"
            result = f"{both:.2f} s, {both / copy_s:.1f} copies; {both / one:.2f} of one bucket at a time"
            print(f"{transport}, {what}: {result}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    receive(Path(sys.argv[2])) if sys.argv[1] == "receive" else main()
