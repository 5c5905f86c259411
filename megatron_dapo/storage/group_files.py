"""Groups of responses as two files, `NAME.json` and `NAME.npz`: without pickle, equal in every bit, damage is noticed.

The JSON file is one line and its SHA-256; the line holds the SHA-256 of the file of arrays. A checkpoint holds its
carried groups so; and with `run.save_batches` each step its batch, which `megatron-dapo replay` computes again.
"""

import hashlib
import json
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.experience.groups import ScoredGroup, ScoredResponse
from megatron_dapo.storage.durable import replace_folder, sync_file
from megatron_dapo.storage.run_dir import RunDir
from reward.verdict import Verdict
from rollout.generation import FinishReason, Generation


class GroupFileError(RuntimeError):
    """A file that is missing or damaged. The message names it."""


def save_groups(folder: Path, name: str, groups: Sequence[ScoredGroup], extra: Mapping[str, Any]) -> None:
    """Returns when both files are on disk.

    Args:
        extra: the caller's own values, which JSON can hold.
    """
    responses = [response for group in groups for response in group.responses]
    empty = [np.zeros(0, np.int32)]
    np.savez(
        folder / f"{name}.npz",
        prompt_ids=np.concatenate([group.prompt_ids for group in groups] or empty),
        token_ids=np.concatenate([response.generation.token_ids for response in responses] or empty),
        log_probs=np.concatenate(
            [response.generation.log_probs for response in responses] or [np.zeros(0, np.float32)]
        ),
        weight_versions=np.concatenate([response.generation.weight_versions for response in responses] or empty),
    )
    content = {
        "extra": dict(extra),
        "groups": [_group_json(group) for group in groups],
        "arrays": _digest((folder / f"{name}.npz").read_bytes()),
    }
    text = json.dumps(content)
    (folder / f"{name}.json").write_text(f"{text}\n{_digest(text.encode())}\n")
    for ending in ("json", "npz"):
        sync_file(folder / f"{name}.{ending}")


def load_groups(folder: Path, name: str) -> tuple[tuple[ScoredGroup, ...], dict[str, Any]]:
    """Groups and `extra` of `save_groups`.

    Raises:
        GroupFileError: a file is missing or damaged.
    """
    try:
        text, digest = (folder / f"{name}.json").read_text().splitlines()
        if digest != _digest(text.encode()):
            raise ValueError(f"{name}.json does not have its own checksum")
        content = json.loads(text)
        if content["arrays"] != _digest((folder / f"{name}.npz").read_bytes()):
            raise ValueError(f"{name}.npz does not have the checksum that {name}.json names")
        with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
            reader = _Reader({key: arrays[key] for key in arrays.files})
        groups = tuple(_group(entry, reader) for entry in content["groups"])
    # What the readers make of a damaged file: no zip, no JSON, a key that is not there, too few elements.
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise GroupFileError(
            f"{folder}: {name}.json or {name}.npz is missing or damaged ({type(error).__name__}: {error})"
        ) from None
    return groups, content["extra"]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _group_json(group: ScoredGroup) -> dict[str, object]:
    return {
        "position": group.position,
        "prompt_index": group.prompt_index,
        "weight_version": group.weight_version,
        "prompt_tokens": len(group.prompt_ids),
        "responses": [
            {
                "request_id": response.generation.request_id,
                "tokens": len(response.generation.token_ids),
                "finish_reason": response.generation.finish_reason,
                "text": response.text,
                "verdict": asdict(response.verdict),
                "reward_raw": response.reward_raw,
                "reward_shaped": response.reward_shaped,
                "other_accuracy": response.other_accuracy,
            }
            for response in group.responses
        ],
    }


class _Reader:
    """Hands out consecutive slices of the flat arrays."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._at = dict.fromkeys(arrays, 0)

    def take(self, name: str, count: int) -> np.ndarray:
        at = self._at[name]
        self._at[name] = at + count
        return self._arrays[name][at : at + count]


def _group(entry: dict, reader: _Reader) -> ScoredGroup:
    return ScoredGroup(
        position=entry["position"],
        prompt_index=entry["prompt_index"],
        prompt_ids=reader.take("prompt_ids", entry["prompt_tokens"]),
        weight_version=entry["weight_version"],
        responses=tuple(_response(response, reader) for response in entry["responses"]),
    )


def _response(entry: dict, reader: _Reader) -> ScoredResponse:
    verdict = Verdict(**entry["verdict"])
    return ScoredResponse(
        generation=Generation(
            request_id=entry["request_id"],
            token_ids=reader.take("token_ids", entry["tokens"]),
            log_probs=reader.take("log_probs", entry["tokens"]),
            weight_versions=reader.take("weight_versions", entry["tokens"]),
            finish_reason=FinishReason(entry["finish_reason"]),
        ),
        text=entry["text"],
        verdict=verdict,
        accuracy=verdict.accuracy,
        reward_raw=entry["reward_raw"],
        reward_shaped=entry["reward_shaped"],
        other_accuracy=entry.get("other_accuracy"),
    )


def save_batch(run_dir: RunDir, step: int, groups: Sequence[ScoredGroup], advantages: np.ndarray) -> None:
    """Keep the groups that rollout step `step` trains on, and drop batches from before the oldest checkpoint. Step 1's
    stays: it starts from the model that the run was begun with.

    Whole or not at all: a resumed run writes a step anew while the batch of its first time is still there.

    Args:
        advantages: float32 [R], as the step uses them.
    """
    folder = batch_folder(run_dir.path, step)
    for left in folder.parent.glob(".step_*"):  # of a save that was killed
        shutil.rmtree(left)
    aside = folder.with_name(f".{folder.name}.tmp")
    aside.mkdir(parents=True)
    save_groups(aside, "batch", groups, {"advantages": advantages.tolist()})
    replace_folder(aside, folder, durable=True)
    kept = run_dir.checkpoints()
    for old in folder.parent.glob("step_*"):
        if kept and 1 < int(old.name.removeprefix("step_")) <= kept[0].step:
            shutil.rmtree(old)


def load_batch(run_path: Path, step: int) -> tuple[tuple[ScoredGroup, ...], np.ndarray]:
    """Groups and advantages of `save_batch`.

    Raises:
        GroupFileError: there is none, or it is damaged.
    """
    folder = batch_folder(run_path, step)
    if not folder.is_dir():
        there = sorted(int(found.name.removeprefix("step_")) for found in folder.parent.glob("step_*"))
        raise GroupFileError(
            f"{folder} is not there; kept are the batches of steps {', '.join(map(str, there)) or '(none)'}; a run "
            "keeps them with run.save_batches=true"
        )
    groups, extra = load_groups(folder, "batch")
    return groups, np.array(extra["advantages"], np.float32)


def batch_folder(run_path: Path, step: int) -> Path:
    """Of rollout step `step`."""
    return run_path / "batches" / f"step_{step}"
