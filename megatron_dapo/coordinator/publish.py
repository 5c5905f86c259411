"""New weights: from the Megatron ranks to every server, checked by checksum (docs/architecture.md, law 6)."""

import asyncio
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from megatron_dapo.cluster.engines import key_file
from megatron_dapo.coordinator.run_context import RunContext
from megatron_dapo.monitor.console import Count
from rollout.fleet.weight_update import OnDisk
from rollout.weights.sender import Sent
from rollout.weights.transport import SendRequest, Target
from rollout.wire.client import ServerInfo


async def publish_weights(context: RunContext, version: int) -> dict[str, float | int]:
    """Returns when every server holds the trainer's weights as `version`, proven tensor by tensor: the metrics
    `weight_sync/*`."""
    started = time.monotonic()
    config, fleet, handover = context.config, context.fleet, context.handover
    deadline = config.run.step_deadline_s

    def count() -> Count:
        return Count(sum(member.weight_version == version for member in fleet.members), len(fleet.members), "servers")

    in_time = partial(context.waits.wait_for, f"weight version {version}", "rollout servers", deadline, count=count)
    folder = context.run_dir.path / "weights" / f"v{version}"
    context.run_dir.check_there()
    await handover.to_trainer()
    way = config.way_of_weights(on_gpus=context.trainer.on_gpu, shared=context.shared_gpu)
    if way == "disk":
        checksums = await context.trainer.write_weights(folder, fleet.kinds)
        await handover.to_servers()
        report = await in_time(fleet.publish(folder, version, checksums))
    else:
        await handover.to_servers(weights_only=True)
        weights = TrainerWeights(context, folder, way)
        report = await in_time(fleet.publish_stream(weights, version))
        if handover.shared and len(report.servers) < len(fleet.members):
            await weights.to_disk()  # for the servers that come back: once all have their memory, it is too late
        await handover.to_servers()
    for url, reason in report.by_disk.items():
        context.console.note(f"weight version {version}: sending to {url} failed; it reads from disk ({reason})")
    # Older ones may go; not the last while a server may still read it, nor what is being written for one that failed.
    kept = [f".v{version}.", *([f".v{version - 1}."] if len(report.servers) < len(fleet.members) else [])]
    for older in folder.parent.glob("*"):
        if not any(name in f".{older.name}." for name in kept):
            # NFS keeps a file that a server still has open; what is left goes with the next version.
            await asyncio.to_thread(shutil.rmtree, older, ignore_errors=True)
    seconds = max(time.monotonic() - started, 1e-9)
    return {
        "weight_sync/gb_per_s": report.bytes / 1e9 / seconds,
        "weight_sync/changed": report.changed,
        "weight_sync/by_disk": len(report.by_disk),
        "weight_sync/standstill": report.standstill_s / seconds,
        "weight_sync/stopped": report.stopped_s / seconds,
    }


class TrainerWeights:
    """The weights that the trainer holds when this is made (rollout.fleet.weight_update.WeightStream)."""

    def __init__(self, context: RunContext, folder: Path, way: Literal["tensor", "distributed", "delta"]) -> None:
        """`folder`: where they are written if a server has to read them."""
        self._context, self._folder, self._way = context, folder, way
        self._changes = context.trainer.weight_changes
        self._written: OnDisk | None = None
        self._hashed = set[ServerInfo]()

    async def send(self, targets: Sequence[Target], label: str, *, more: bool) -> Sent:
        config, trainer = self._context.config, self._context.trainer
        on_gpu = any(target.info.device == "cuda" for target in targets) and trainer.on_gpu
        request = SendRequest(
            transport=self._way,
            targets=tuple(targets),
            label=label,
            deadline_s=config.rollout.sync_deadline_s,
            backend="nccl" if on_gpu and not self._context.shared_gpu else "gloo",
            api_key_file=key_file(config, self._context.run_dir.path),
            more=more,
        )
        kinds = [info for info in self._context.fleet.kinds if info not in self._hashed]
        sent = await trainer.send_weights(request, kinds)
        self._hashed |= sent.checksums.keys()
        return sent

    @property
    def changed(self) -> bool:
        return self._context.trainer.weight_changes != self._changes

    async def to_disk(self) -> OnDisk | None:
        handover = self._context.handover
        if self._written is None and not self.changed and (handover.trainer_has_it or not handover.shared):
            # Calls to the ranks keep their order: whatever changes the weights later comes after this.
            checksums = await self._context.trainer.write_weights(self._folder, self._context.fleet.kinds)
            self._written = OnDisk(folder=self._folder, checksums=checksums)
        return self._written
