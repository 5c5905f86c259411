"""Checkpoints of the actor: model, optimizer, step count, random state, in Megatron's distributed format.

    folder/  __0_0.distcp ...  every rank's shards        .metadata, metadata.json, common.pt  Megatron's
             actor.json        layout, optimizer step, the caller's own small values
             manifest.json     SHA-256 of every other file

A checkpoint is written beside its place and renamed, so a folder of that name is a whole one. Shards are read into any
layout. Before anything is loaded every file is compared with the manifest.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from torch.distributed import checkpoint as torch_checkpoint

from megatron_dapo.actor.checkpoint_pickles import refuse_foreign_code
from megatron_dapo.actor.messages import CheckpointError
from megatron_dapo.actor.optimizer import ActorOptimizer
from megatron_dapo.actor.optimizer_state import FORMAT, sharded_optimizer_state

STATE_FILE = "actor.json"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """What stands in `actor.json`."""

    optimizer_steps: int
    layout: Mapping[str, Any]
    """The layout that wrote it; the one that reads may differ."""

    distributed_optimizer: bool | None
    """State of the distributed and of the plain optimizer do not interchange. None: a model without any."""

    extra: Mapping[str, Any]
    """The caller's own values."""

    def text(self) -> str:
        """As JSON."""
        return json.dumps({name: getattr(self, name) for name in CheckpointState.__slots__}, indent=1)


def save(
    folder: Path, optimizer: ActorOptimizer, *, layout: Mapping[str, Any], extra: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint to `folder` (on a file system that all ranks see); one that stands there is replaced.

    Args:
        layout: `dataclasses.asdict` of the LayoutConfig.
        extra: small values that JSON can hold.
    """
    folder = Path(folder)
    aside = folder.with_name(f"{folder.name}.partial")
    state = CheckpointState(
        optimizer_steps=optimizer.optimizer_steps,
        layout=layout,
        distributed_optimizer=optimizer.config.distributed,
        extra=extra or {},
    )
    # Before any rank waits for another: what JSON cannot hold is refused on all of them.
    text = state.text()
    _on_rank_0(folder, lambda: _empty(aside))
    dist_checkpointing.save(
        _sharded_state(optimizer, loading=False) | {"rng": _all_random_states()},
        str(aside),
        sharded_strategy=_SaveInProcess("torch_dist", 1),
    )
    names = _on_rank_0(folder, lambda: _write_state(aside, text))
    digests = _digests(aside, names)
    _on_rank_0(folder, lambda: _finish(aside, folder, digests))


def load(folder: Path, optimizer: ActorOptimizer, *, layout: Mapping[str, Any]) -> CheckpointState:
    """Load weights, optimizer, step count, and, at the layout that wrote it, each rank's random state.

    Raises:
        CheckpointError: on every rank, before anything was changed, if a file is missing, damaged or of another kind.
    """
    folder = Path(folder)
    _verify(folder)
    refuse_foreign_code(folder)
    state = CheckpointState(**json.loads((folder / STATE_FILE).read_text()))
    if state.distributed_optimizer is None:
        raise CheckpointError(
            f"{folder}: holds a model without optimizer state, so no run goes on from it; to start from its weights "
            "convert it to a Hugging Face folder and give that as model.path"
        )
    if state.distributed_optimizer != optimizer.config.distributed:
        raise CheckpointError(
            f"{folder / STATE_FILE}: written with actor.optimizer.distributed = {state.distributed_optimizer}; "
            "the two kinds of optimizer state do not interchange, so set it to that"
        )
    loaded = dist_checkpointing.load(_sharded_state(optimizer, loading=True), str(folder))
    for name, chunk in _named_chunks(optimizer).items():
        chunk.load_state_dict(loaded[name])
    optimizer.load_state(loaded["optimizer"], state.optimizer_steps)
    if dict(state.layout) == dict(layout):
        _set_random_state(loaded["rng"][dist.get_rank()])
    return state


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Megatron's format, written by this process.

    Megatron's own writer starts a process by spawning, which imports the caller's main module once more, and 0.16 forks
    this process with all its threads to write. Neither is safe in a Ray actor, and a save that hangs says nothing.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def _named_chunks(optimizer: ActorOptimizer) -> dict[str, MegatronModule]:
    """Megatron's names of the model chunks in a state dict, and the chunks without their wrapper."""
    chunks = [chunk.module for chunk in optimizer.chunks]
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{i}": chunk for i, chunk in enumerate(chunks)}


def _sharded_state(optimizer: ActorOptimizer, *, loading: bool) -> dict[str, Any]:
    """Model and optimizer as Megatron's shards that fit any layout."""
    metadata = {
        "distrib_optim_sharding_type": FORMAT,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(optimizer).items()}
    model_state = state["model"] if "model" in state else dict(state)
    optimizer_state = sharded_optimizer_state(optimizer.megatron, model_state, metadata, loading=loading)
    return state | {"optimizer": optimizer_state}


def _all_random_states() -> list[dict[str, Any]]:
    """Every rank's generators, on every rank: a few kilobytes each, stored once with the common values."""
    own: dict[str, Any] = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_initialized():
        own["cuda"] = torch.cuda.get_rng_state()
    states: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(states, own)
    return states


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def _on_rank_0(folder: Path, action: Callable[[], list[str] | None]) -> list[str]:
    """What `action` returns on rank 0, or its failure, on every rank: none waits for a rank that is gone."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except OSError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer, src=0)
    result, failure = answer
    if failure is not None:
        raise CheckpointError(f"{folder}: the checkpoint could not be written: {failure}")
    return result


def _empty(aside: Path) -> None:
    """A fresh folder; what a killed save left there goes."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _write_state(aside: Path, text: str) -> list[str]:
    """Write the state file; the names of all files, which rank 0 alone lists: others may see a shared disk later."""
    (aside / STATE_FILE).write_text(text)
    return sorted(path.name for path in aside.iterdir())


def _finish(aside: Path, folder: Path, digests: Mapping[str, str]) -> None:
    """Write the manifest and rename `aside` to `folder`. A checkpoint that stands there is deleted last."""
    (aside / MANIFEST_FILE).write_text(json.dumps(digests, indent=1))
    old = folder.with_name(f"{folder.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each file, on every rank; the ranks share the reading."""
    own = {name: sha256(folder / name) for name in names[dist.get_rank() :: dist.get_world_size()]}
    parts: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, own)
    return {name: digest for part in parts for name, digest in part.items()}


def sha256(file: Path) -> str:
    """Of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _verify(folder: Path) -> None:
    """Compare the folder's files with its manifest, the ranks sharing the reading."""
    expected = read_manifest(folder / MANIFEST_FILE)
    missing = sorted(name for name in expected if not (folder / name).is_file())
    if missing:
        raise CheckpointError(f"{folder / missing[0]} is missing: the checkpoint is not whole; load an earlier one")
    found = _digests(folder, sorted(expected))
    damaged = sorted(name for name, digest in expected.items() if found[name] != digest)
    if damaged:
        raise CheckpointError(
            f"{folder / damaged[0]} is damaged: its SHA-256 is not that of {MANIFEST_FILE}; load an earlier checkpoint"
        )


def read_manifest(file: Path) -> dict[str, str]:
    """SHA-256 by file name.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: {file.parent} is no whole checkpoint; load an earlier one")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}; load an earlier checkpoint") from error
