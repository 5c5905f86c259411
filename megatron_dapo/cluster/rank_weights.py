"""The weights of one trainer rank on their way to the servers: into a folder, or straight into their memory.

Where the actor's buckets meet the fleet's transports; in the process of each rank, acting on rank 0.
"""

import json
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.device.process_groups import gather_objects
from megatron_dapo.actor.weights.hf_weights import hf_shapes
from rollout.weights.checksums import Checksums, ChecksumStream
from rollout.weights.sender import GroupCache, Sent, WeightSender
from rollout.weights.transport import SendRequest
from rollout.wire.client import ServerInfo


class RankWeights:
    """What every rank is asked for together; the answers are rank 0's."""

    def __init__(
        self, actor: MegatronActor, *, bucket_bytes: int, quantization: Mapping[str, Any] | None = None
    ) -> None:
        """`quantization`: the servers' (rollout.config.QUANTIZATION); None: none."""
        self._actor, self._bucket_bytes, self._quantization = actor, bucket_bytes, quantization
        self._groups = GroupCache()

    def write(self, folder: Path, kinds: Sequence[ServerInfo]) -> dict[ServerInfo, Checksums]:
        """Export to `folder`; checksums of what was written, computed on the way."""
        with self._checksums(kinds) as checksums:
            self._actor.export_hf(folder, lambda name, tensor: checksums.add({name: tensor}), self._quantization)
            return checksums.finish() if self._actor.rank == 0 else {}

    def send(self, request: SendRequest, kinds: Sequence[ServerInfo]) -> Sent | None:
        """Into the memory of the request's servers; by `tensor` from all ranks."""
        rank, device, gather = self._actor.rank, self._actor.device.device, None
        stream = partial(self._actor.stream_weights, quantize=self._quantization is not None)
        beside = request.transport == "tensor"
        # Made on every rank: a model whose checksums are not known fails on all of them, and none waits for another.
        with self._checksums(kinds) as checksums:
            if beside:
                each = max([target.info.tensor_parallel for target in request.targets], default=1)
                own = tuple(target for target in request.targets if target.index * each == rank)
                request, gather = replace(request, targets=own), partial(_beside, rank - rank % each, each)
                checksums = checksums if rank == 0 else self._checksums(())
            elif rank > 0:
                stream(None, self._bucket_bytes)
                return None
            with WeightSender(request, checksums, self._groups, device, gather) as sender:
                stream(sender, self._bucket_bytes)
                sent = sender.report()
                # Inside, since until then servers may read what other ranks hold.
                failures = gather_objects(dict(sent.failures)) if beside else [sent.failures]
        if beside and device.type == "cuda":  # the servers take the rest of their memory next
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        return replace(sent, failures=dict(ChainMap(*failures)))

    def _checksums(self, kinds: Sequence[ServerInfo]) -> ChecksumStream:
        config: dict[str, Any] = json.loads((Path(self._actor.model.path) / "config.json").read_text())
        return ChecksumStream(config, hf_shapes(self._actor.hf, quantize=self._quantization is not None), kinds)


def _beside(first: int, ranks: int, value: Any) -> list[Any]:
    return gather_objects(value)[first : first + ranks]
