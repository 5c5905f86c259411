"""Checkpoints of the actor: model, optimizer, step count, random state, in Megatron's distributed format.

    folder/  __0_0.distcp ...  every rank's shards        .metadata, metadata.json, common.pt  Megatron's
             actor.json        layout, optimizer step
             manifest.json     a checksum of every other file

A checkpoint is written beside its place and renamed, so a folder of that name is a whole one. It can be written while
training goes on: `begin` returns when the state is copied, `PendingSave.finish` makes the folder whole. Shards are read
into any layout. With LoRA the model is the adapters alone: the rest is read from `model.path`. Before anything is
loaded every file is compared with the manifest.
"""

import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed import checkpoint as torch_checkpoint

from megatron_dapo.actor.checkpoint import checkpoint_files as files
from megatron_dapo.actor.checkpoint.checkpoint_pickles import refuse_foreign_code
from megatron_dapo.actor.checkpoint.shard_writer import ShardWriter, Written, available_bytes
from megatron_dapo.actor.device.process_groups import gather_objects
from megatron_dapo.actor.optimizer import ActorOptimizer
from megatron_dapo.actor.step_data import CheckpointError
from megatron_dapo.config.actor_config import LayoutConfig
from megatron_dapo.storage.durable import replace_file, sync

MEMORY_SHARE = 0.5
"""Of a host's available memory, what the copies of its ranks may take; else they write before training goes on."""

EXTRA_STATE = "_extra_state"
"""In the names of entries that TransformerEngine's layers have besides Megatron's local ones. They hold nothing with
any FP8 recipe of `actor.fp8_recipe`; so none is asked for, and a checkpoint is read with and without
TransformerEngine."""

COMMON_BYTES = 2**22
"""More than Megatron's common values and the random states of some hundred ranks."""


def begin(folder: Path, optimizer: ActorOptimizer, layout: LayoutConfig, *, background: bool) -> "PendingSave":
    """Begin a checkpoint in `folder` (on a file system that all ranks see); one that stands there is replaced.

    Args:
        background: copy what the ranks hold and write it in threads of theirs. A host without room for the copies makes
            all ranks write before this returns.
    """
    aside = folder.with_name(f"{folder.name}.partial")
    _on_rank_0(folder, lambda: _make_empty(aside))
    sharded = _sharded_state(optimizer, loading=False)
    # After that: before the first step it is what makes the moments.
    writer = ShardWriter(aside, optimizer.memory.storages())
    dist_checkpointing.save(sharded | {"rng": _all_random_states()}, str(aside), sharded_strategy=_PlanOnly(writer))
    steps, config, adapters = optimizer.optimizer_steps, optimizer.config, optimizer.adapters
    extra = {"lora": asdict(optimizer.lora), "base": adapters.base} if adapters else {}
    extra |= {"compact": config.compact} if config.compact != "none" else {}
    state = files.state_text(steps, layout, distributed_optimizer=config.distributed, extra=extra)
    _on_rank_0(folder, lambda: replace_file(aside / files.STATE_FILE, state))
    in_background = background and _has_room(writer.bytes_to_copy)
    if in_background:
        writer.copy()
        writer.start()
    else:
        writer.write()
    return PendingSave(folder, aside, writer, in_background=in_background)


class PendingSave:
    """A checkpoint that is being written. Collective: every rank makes every call, in the same order."""

    def __init__(self, folder: Path, aside: Path, writer: ShardWriter, *, in_background: bool) -> None:
        self.in_background = in_background
        """False: there was no room for copies, or none were asked for; everything is written."""
        self._folder, self._aside, self._writer = folder, aside, writer

    def done(self) -> bool:
        """Whether `finish` would wait on no rank."""
        return all(gather_objects(self._writer.written.done()))

    def finish(self) -> None:
        """Wait for every rank's writer and put the checkpoint in its place.

        Raises:
            CheckpointError: on every rank, if one could not write; what it wrote is removed.
        """
        own = self._writer.written.result()
        written: list[Written] | None = [own] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, written, dst=0)
        _on_rank_0(self._folder, lambda: self._publish(written or []))

    def _publish(self, written: Sequence[Written]) -> None:
        failures = [f"rank {rank}: {one.failure}" for rank, one in enumerate(written) if one.failure is not None]
        try:
            if failures:
                raise OSError("; ".join(failures))
            self._writer.write_index([one.results for one in written])
            digests = {name: digest for one in written for name, digest in one.digests.items()}
            # The rest is rank 0's own: Megatron's common values, the index, the state file, ranks without shards.
            rest = sorted({path.name for path in self._aside.iterdir()} - digests.keys())
            for name in rest:  # Megatron leaves its common values to the system
                sync(self._aside / name)
                digests[name] = files.digest_of(self._aside / name)
            files.put_in_place(self._aside, self._folder, digests)
        except OSError:
            shutil.rmtree(self._aside, ignore_errors=True)  # a full disk should be no fuller than before
            raise


def load(folder: Path, optimizer: ActorOptimizer, layout: LayoutConfig) -> None:
    """Load weights, optimizer, step count, and, at the layout that wrote it, each rank's random state.

    Raises:
        CheckpointError: on every rank, before anything was changed, if a file is missing, damaged or of another kind.
            Any other exception, of a disk that fails or a model of other sizes, leaves a state that is half loaded.
    """
    files.check_whole(folder, slice(dist.get_rank(), None, dist.get_world_size()), gather_objects)
    refuse_foreign_code(folder)
    base = optimizer.adapters.base if optimizer.adapters else ""
    state = files.read_state(folder, optimizer=optimizer.config, lora=optimizer.lora, base=base)
    loaded = dist_checkpointing.load(_sharded_state(optimizer, loading=True), str(folder))
    for name, chunk in _named_chunks(optimizer).items():
        lacking = chunk.load_state_dict(loaded[name], strict=False).missing_keys
        trained = {key for key, parameter in chunk.named_parameters() if hasattr(parameter, "main_grad")}
        assert trained.isdisjoint(lacking), f"{name} was not asked for {lacking}"
    optimizer.load_state(loaded["optimizer"], state["optimizer_steps"])
    if state["layout"] == asdict(layout):
        _set_random_state(loaded["rng"][dist.get_rank()])


class _PlanOnly(mcore.TorchDistSaveShardedStrategy):
    """Megatron's format, planned by all ranks now and written by `writer` later."""

    def __init__(self, writer: ShardWriter) -> None:
        super().__init__("torch_dist", 1)
        self._writer = writer

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        by_key, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        replicated = not self.keep_only_main_replica
        planner = mcore.MCoreSavePlanner(dedup_replicated_tensors=replicated, flatten_state_dict=False)
        state = mcore.mcore_to_pyt_state_dict(by_key, False)
        torch_checkpoint.save(state, storage_writer=self._writer, planner=planner)


def _has_room(own_bytes: int) -> bool:
    """Whether every host holds the copies of all its ranks; the same answer on every rank."""
    places = gather_objects((socket.gethostname(), own_bytes, available_bytes()))
    return all(sum(n for at, n, _ in places if at == host) <= MEMORY_SHARE * free for host, _, free in places)


def _named_chunks(optimizer: ActorOptimizer) -> dict[str, Any]:
    """Megatron's names of the model chunks in a state dict, and the chunks without their wrapper."""
    chunks = [chunk.module for chunk in optimizer.chunks]
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{i}": chunk for i, chunk in enumerate(chunks)}


def _sharded_state(optimizer: ActorOptimizer, *, loading: bool) -> dict[str, Any]:
    """Model and optimizer as Megatron's shards that fit any layout."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "dp_cp_group": group}
    adapters, state = optimizer.adapters, {}
    for name, chunk in _named_chunks(optimizer).items():
        shards = adapters.sharded_state(chunk) if adapters else chunk.sharded_state_dict(metadata=metadata)
        state[name] = {key: shard for key, shard in shards.items() if not (loading and EXTRA_STATE in key)}
    return state | {"optimizer": optimizer.sharded_state(state.get("model", dict(state)), metadata, loading=loading)}


def _all_random_states() -> list[dict[str, Any]]:
    """Every rank's generators, on every rank: a few kilobytes each, stored once with the common values."""
    own: dict[str, Any] = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_initialized():
        own["cuda"] = torch.cuda.get_rng_state()
    return gather_objects(own)


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def _make_empty(aside: Path) -> None:
    """A fresh folder; what a killed save left there goes. Without room for Megatron's common values, which it writes on
    rank 0 while the others wait, nothing begins."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True, exist_ok=True)
    replace_file(aside / "room", os.urandom(COMMON_BYTES))  # what cannot be compressed
    (aside / "room").unlink()


def _on_rank_0(folder: Path, action: Callable[[], None]) -> None:
    """Rank 0's action; its failure is every rank's: none waits for a rank that is gone."""
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure[0] = str(error)
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise CheckpointError(f"{folder}: the checkpoint could not be written: {failure[0]}")
