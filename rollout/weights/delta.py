"""`rollout.weight_sync: delta`: the trainer's end of a weight sync in which only what changed travels
(rollout.weights.changes)."""

import base64
import json
import pickle
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rollout.weights import LOADER
from rollout.weights.changes import encode
from rollout.weights.transport import Clients, Failure, GroupTransport, SendRequest


@dataclass
class Base:
    """The weights that servers hold, in host memory; the same for every group of a trainer. They are replaced by those
    of a publish while its last servers are sent to."""

    buckets: dict[str, Tensor] = field(default_factory=dict)
    """By the name of a bucket's first tensor, its bytes."""
    label: str | None = None
    """The servers' name of them; None: they are of more than one version."""


class DeltaTransport(GroupTransport):
    """A process group that sends what differs from the weights which its servers hold.

    A bucket goes whole in the first publish of a group, and where that is better (`encode`). So does everything after a
    publish that did not end well, or unless every server was verified to hold those weights.
    """

    def __init__(self, request: SendRequest, device: torch.device, base: Base) -> None:
        super().__init__(request, device)
        self._base = base
        self._before: dict[str, Tensor] = {}
        """Of the next bucket, on its way to the device."""
        self._complete, self._whole = False, True
        """Whether the last publish of this group ended well; whether nothing of this one can be left out."""
        self._up, self._down = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._unchanged = self._saved = 0

    async def join(self, clients: Clients) -> dict[str, Failure]:
        """As `GroupTransport.join`."""
        base = self._base
        known = self._complete and base.label is not None
        self._whole = not known or any(target.holds != base.label for target in self.targets)
        self._complete, self._unchanged, self._saved = False, 0, 0
        if not self.more:
            base.label = None
        self._fetch(next(iter(base.buckets), ""))
        return await super().join(clients)

    async def send(self, buffer: Tensor, bucket: Any, clients: Clients, label: str | None) -> dict[str, Failure]:
        """As `GroupTransport.send`."""
        name, dtype = next(iter(bucket.shapes)), bucket.dtype
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)
        before = self._before.pop(name, None)
        changes = None if before is None else encode(buffer.view(dtype), before.view(dtype))
        del before  # both have been compared by now, so its memory may be that of the next one
        if not self.more:
            self._keep(name, buffer)
        self._fetch(dict(pairwise(self._base.buckets)).get(name, ""))
        if changes is None:
            failures = await super().send(buffer, bucket, clients, label)
        else:
            data, counts = changes
            self._unchanged += buffer.numel() - sum(counts) * dtype.itemsize
            self._saved += buffer.numel() - data.numel()
            failures = await self._beside(self._calls(bucket, data.numel(), counts, clients, label), data, name)
        self._complete = label is not None and not failures
        if not self.more:
            self._base.label = label if self._complete else None
        return failures

    def settle(self) -> None:
        """Returns when the buffer that was sent may be used again."""
        if self._down is not None:
            self._down.synchronize()

    @property
    def left_out(self) -> tuple[int, int]:
        """Bytes that this publish did not send, and those of values that had not changed."""
        return self._saved, self._unchanged

    def _calls(self, bucket: Any, size: int, counts: list[int], clients: Clients, label: str | None) -> dict[str, Any]:
        """In which the servers receive `size` bytes."""
        told = {"group": self.name, "dtype": str(bucket.dtype).removeprefix("torch."), "bytes": size, "counts": counts}
        text = json.dumps(told | {"tensors": list(bucket.shapes.items())})
        payload = base64.b64encode(pickle.dumps([(text, torch.empty(0, dtype=torch.uint8))])).decode()
        most = max(target.info.tensor_parallel for target in self.targets)  # each rank takes the one of its place
        body = {"serialized_named_tensors": [payload] * most, "load_format": LOADER, "disable_draft_model": True}
        return {url: client.update_weights("tensor", body, label, self._deadline_s) for url, client in clients.items()}

    def _keep(self, name: str, buffer: Tensor) -> None:
        """For the next publish, beside what follows."""
        if name not in self._base.buckets:
            self._base.buckets[name] = torch.empty_like(buffer, device="cpu", pin_memory=buffer.is_cuda)
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(buffer.device))  # the bucket is filled
        with torch.cuda.stream(self._down):
            self._base.buckets[name].copy_(buffer, non_blocking=True)

    def _fetch(self, name: str) -> None:
        """Begins to bring what is held of a bucket to the device, beside what is still done with the one before."""
        held = None if self._whole else self._base.buckets.get(name)
        with torch.cuda.stream(self._up):
            self._before = {} if held is None else {name: held.to(self._device, non_blocking=True)}
