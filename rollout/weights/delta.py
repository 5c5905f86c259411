"""`rollout.weight_sync: delta`: the trainer's end of a weight sync in which only what changed travels
(rollout.weights.changes)."""

import base64
import json
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollout.weights import LOADER
from rollout.weights.changes import encode
from rollout.weights.transport import Failure, GroupTransport, SendRequest
from rollout.wire.client import SglangClient


class DeltaTransport(GroupTransport):
    """A process group that keeps the weights which its servers hold, in host memory, and sends what differs from them.

    A bucket goes whole in the first publish of a group, and where that is better (`encode`). So does everything after a
    publish that did not end well, or unless every server was verified to hold those weights.
    """

    def __init__(self, request: SendRequest, device: torch.device) -> None:
        super().__init__(request, device)
        self._held: dict[str, Tensor] = {}
        """By the name of a bucket's first tensor, its bytes."""
        self._label: str | None = None
        """The servers' name of them; None: some are of another version."""
        self._known = False
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.unchanged = self.saved = 0
        """Bytes of the values that were left out of this publish, and by how much less was sent."""

    def begin(self, request: SendRequest) -> None:
        """Before a publish."""
        self._known = self._label is not None and all(target.holds == self._label for target in request.targets)
        self._label, self.unchanged, self.saved = None, 0, 0

    async def send(
        self, buffer: Tensor, bucket: Any, clients: Mapping[str, SglangClient], label: str | None
    ) -> dict[str, Failure]:
        """As `GroupTransport.send`."""
        name = next(iter(bucket.shapes))
        held = self._held.get(name) if self._known else None
        changes = None if held is None else encode(buffer.view(bucket.dtype), held.view(bucket.dtype))
        self._keep(name, buffer)
        if changes is None:
            failures = await super().send(buffer, bucket, clients, label)
        else:
            data, counts = changes
            self.unchanged += buffer.numel() - sum(counts) * bucket.dtype.itemsize
            self.saved += buffer.numel() - data.numel()
            failures = await self._beside(self._calls(bucket, data, counts, clients, label), data, name)
        if self._copies is not None:
            self._copies.synchronize()  # the buffer may be used again from here on
        if not failures:
            self._label = label
        return failures

    def _calls(
        self, bucket: Any, data: Tensor, counts: list[int], clients: Mapping[str, SglangClient], label: str | None
    ) -> dict[str, Any]:
        """In which the servers receive `data`."""
        told = {"group": self.name, "dtype": str(bucket.dtype).removeprefix("torch."), "shapes": bucket.shapes}
        told |= {"bytes": data.numel(), "counts": counts}
        payload = base64.b64encode(pickle.dumps([(json.dumps(told), torch.empty(0))])).decode()
        calls = {}
        for target in self.targets:
            payloads = [payload] * target.info.tensor_parallel
            body = {"serialized_named_tensors": payloads, "load_format": LOADER, "disable_draft_model": True}
            calls[target.url] = clients[target.url].update_weights("tensor", body, label, self._deadline_s)
        return calls

    def _keep(self, name: str, buffer: Tensor) -> None:
        """For the next publish, while this one goes on."""
        if name not in self._held:
            self._held[name] = torch.empty_like(buffer, device="cpu", pin_memory=buffer.is_cuda)
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(buffer.device))  # it has been compared
        with torch.cuda.stream(self._copies):
            self._held[name].copy_(buffer, non_blocking=True)
