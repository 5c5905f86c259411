"""A trainer of one process that holds a model's tensors and sends them: the real sender and transports, no Megatron."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rollout.fleet.weight_update import OnDisk
from rollout.weights.checksums import ChecksumStream
from rollout.weights.sender import GroupCache, Sent, WeightSender
from rollout.weights.transport import SendRequest, Target


class MemoryTrainer:
    """A `rollout.fleet.weight_update.WeightStream`, publish after publish."""

    def __init__(
        self, folder: Path, *, bucket_bytes: int = 1 << 16, api_key_file: Path | None = None, device: str = "cpu"
    ) -> None:
        """`folder`: where the model begins, and where `to_disk` writes."""
        self.folder, self.bucket_bytes, self.deadline_s = folder, bucket_bytes, 60.0
        self.api_key_file, self.transport = api_key_file, "delta"
        self.device = torch.device(device)
        self.tensors = load_file(folder / "model.safetensors", device=device)
        self.config = json.loads((folder / "config.json").read_text())
        self.groups = GroupCache()
        self.sent: list[Sent] = []
        self.random = torch.Generator().manual_seed(5)

    def change(self, share: float) -> None:
        """So many values of each tensor grow a little, one at least; zeros do not."""
        for tensor in self.tensors.values():
            chosen = torch.rand(tensor.numel(), generator=self.random) < share
            chosen[int(torch.randint(tensor.numel(), [1], generator=self.random))] = True
            tensor.view(-1)[chosen.to(self.device)] *= 1.02

    def buckets(self) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
        """(as megatron_dapo.actor.weights.buckets.Bucket, its tensors)"""
        names: list[str] = []
        for name in self.tensors:
            names.append(name)
            if sum(self.tensors[each].nbytes for each in names) > self.bucket_bytes or name == list(self.tensors)[-1]:
                parts, names = {each: self.tensors[each] for each in names}, []
                shapes = {each: tuple(part.shape) for each, part in parts.items()}
                size = sum(part.nbytes for part in parts.values())
                dtype = next(iter(parts.values())).dtype
                yield (
                    SimpleNamespace(shapes=shapes, dtype=dtype, dtype_of=lambda _, dtype=dtype: dtype, size=size),
                    parts,
                )

    def send_now(self, targets: Sequence[Target], label: str, *, more: bool = False) -> Sent:
        request = SendRequest(
            transport=self.transport,  # type: ignore[arg-type]
            targets=tuple(targets),
            label=label,
            deadline_s=self.deadline_s,
            backend="gloo",
            api_key_file=self.api_key_file,
            more=more,
        )
        kinds = list(dict.fromkeys(target.info for target in targets))
        with (
            ChecksumStream(self.config, self.tensors.keys(), kinds) as checksums,
            WeightSender(request, checksums, self.groups, self.device, None) as sender,
        ):
            for bucket, parts in self.buckets():
                buffer = sender.buffer(bucket.size)
                torch.cat([part.reshape(-1).view(torch.uint8) for part in parts.values()], out=buffer)
                sizes = [part.nbytes for part in parts.values()]
                views = zip(parts.items(), buffer.split(sizes), strict=True)
                sender.put(bucket, {name: flat.view(part.dtype).view(part.shape) for (name, part), flat in views})
            self.sent.append(sender.report())
        return self.sent[-1]

    def held(self) -> Mapping[str, torch.Tensor]:
        """Copies, as they are now."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        return await asyncio.to_thread(self.send_now, targets, label, more=more)

    @property
    def changed(self) -> bool:
        return False

    async def to_disk(self) -> OnDisk | None:
        save_file(dict(self.held()), self.folder / "model.safetensors", {"format": "pt"})
        return OnDisk(folder=self.folder)
