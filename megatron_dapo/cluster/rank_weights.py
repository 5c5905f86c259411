"""The weights of one trainer rank on their way to the servers: into a folder, or straight into their memory.

Where the actor's buckets meet the fleet's transports, in the process of each rank.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dapo.actor.actor import MegatronActor
from megatron_dapo.actor.device.process_groups import gather_objects
from megatron_dapo.actor.weights.model_tensors import hf_shapes
from rollout.weights.checksums import Checksums, ChecksumStream
from rollout.weights.sender import GroupCache, Sent, Turns, WeightSender
from rollout.weights.transport import SendRequest
from rollout.wire.client import ServerInfo


class RankWeights:
    """What every rank is asked for together; the answers are rank 0's."""

    def __init__(self, actor: MegatronActor, *, bucket_bytes: int, quantization: dict[str, Any] | None = None) -> None:
        """`quantization`: the servers' (rollout.config.QUANTIZATION); None: none."""
        self._actor, self._bucket_bytes, self._quantization = actor, bucket_bytes, quantization
        self._groups = GroupCache(Turns(dist.PrefixStore("weights", dist.distributed_c10d._get_default_store())))

    def write(self, folder: Path, kinds: Sequence[ServerInfo]) -> dict[ServerInfo, Checksums]:
        """Export to `folder`; checksums of what was written, computed on the way."""
        with self._checksums(kinds) as checksums:
            self._actor.export_hf(folder, lambda name, tensor: checksums.add({name: tensor}), self._quantization)
            return checksums.finish() if self._actor.rank == 0 else {}

    def send(self, request: SendRequest, kinds: Sequence[ServerInfo]) -> Sent | None:
        """Into the memory of the request's servers: from the first rank of each pipeline stage what the stage holds; by
        `tensor` everything from all ranks."""
        rank, device, gather, beside = self._actor.rank, self._actor.device.device, None, request.transport == "tensor"
        stream = partial(self._actor.stream_weights, quantize=self._quantization is not None, by_stage=not beside)
        stages = self._actor.passes.pipeline_group
        # Made on every rank: a model whose checksums are not known fails on all of them, and none waits for another.
        with self._checksums(kinds) as checksums:
            if beside:
                each = max([target.info.tensor_parallel for target in request.targets], default=1)
                own = tuple(target for target in request.targets if target.index * each == rank)
                group = slice(rank - rank % each, rank - rank % each + each)
                request, gather = replace(request, targets=own), lambda value: gather_objects(value)[group]
                checksums = checksums if rank == 0 else self._checksums(())
            elif dist.get_global_rank(stages, 0) > 0:
                stream(None, self._bucket_bytes)
                return None
            with WeightSender(request, checksums, self._groups, device, gather) as sender:
                stream(sender, self._bucket_bytes)
                sent = sender.report()
                if beside and rank > 0:  # its checksums are none, and rank 0 counts the bytes
                    sent = Sent(failures=sent.failures)
                # Inside, since until then servers may read what other ranks hold.
                every = gather_objects(sent, None if beside else stages)
        if beside and device.type == "cuda":  # the servers take the rest of their memory next
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        return reduce(Sent.then, every) if rank == 0 else None

    def _checksums(self, kinds: Sequence[ServerInfo]) -> ChecksumStream:
        config: dict[str, Any] = json.loads((Path(self._actor.model.path) / "config.json").read_text())
        return ChecksumStream(config, hf_shapes(self._actor.hf, quantize=self._quantization is not None), kinds)
