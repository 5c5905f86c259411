"""A trainer in rank processes that sends the weights of a folder: the real actor and transports, without Ray."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_dapo.config.actor_config import ActorConfig, LayoutConfig
from megatron_dapo.config.run_config import ModelConfig
from rollout.fleet.weight_update import OnDisk
from rollout.weights.sender import Sent
from rollout.weights.transport import SendRequest, Target
from rollout.wire.client import ServerInfo
from tools.rank_pool import RankPlace


def send(
    place: RankPlace,
    folder: Path,
    requests: Sequence[SendRequest],
    kinds: Sequence[ServerInfo],
    bucket_bytes: int,
    device: str = "cpu",
    dtype: str = "float32",
    quantization: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
) -> list[Sent | None]:
    """One after the other, by one trainer, at TP = all ranks without a `layout`: its process groups stay."""
    from megatron_dapo.actor.actor import MegatronActor

    actor = MegatronActor(
        ActorConfig(layout=LayoutConfig(**(layout or {"tensor": place.world_size})), device=device),
        ModelConfig(path=str(folder), context_length=64, dtype=dtype),
        rank=place.rank,
        world_size=place.world_size,
        rendezvous=place.rendezvous,
        steps_per_rollout=1,
        seed=1,
        timeout_s=120,
    )
    from megatron_dapo.cluster.rank_weights import RankWeights

    weights = RankWeights(actor, bucket_bytes=bucket_bytes, quantization=quantization)
    return [weights.send(request, kinds) for request in requests]


class PoolTrainer:
    """The weights of a folder as a `rollout.fleet.weight_update.WeightStream`."""

    def __init__(
        self, run: Callable[..., list[Any]], folder: Path, transport: str, *, deadline_s: float = 60.0, **place: Any
    ) -> None:
        """
        Args:
            run: RankPool.run.
            transport: of SendRequest.
            place: `ranks` (2), `backend` ("gloo"), and `bucket_bytes`, `device`, `dtype`, `quantization`, `layout` as
                for `send`.
        """
        self.run, self.folder, self.transport, self.deadline_s = run, folder, transport, deadline_s
        self.ranks, self.bucket_bytes = place.pop("ranks", 2), place.pop("bucket_bytes", 1 << 20)
        self.backend = place.pop("backend", "gloo")
        self.place = place
        self.written = 0
        self.sent: Sent | None = None

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        request = SendRequest(
            transport=self.transport,  # type: ignore[arg-type]
            targets=tuple(targets),
            label=label,
            deadline_s=self.deadline_s,
            backend=self.backend,
            api_key_file=None,
            more=more,
        )
        kinds = list(dict.fromkeys(target.info for target in targets))
        known = {"device": "cpu", "dtype": "float32", "quantization": None, "layout": None} | self.place
        where = [known[name] for name in ("device", "dtype", "quantization", "layout")]
        results = await asyncio.to_thread(
            self.run, self.ranks, send, self.folder, [request], kinds, self.bucket_bytes, *where, timeout_s=300
        )
        self.sent = results[0][0]
        assert self.sent is not None
        return self.sent

    @property
    def changed(self) -> bool:
        return False

    async def to_disk(self) -> OnDisk | None:
        self.written += 1
        return OnDisk(folder=self.folder)
