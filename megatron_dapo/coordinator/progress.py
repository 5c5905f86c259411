"""What a checkpoint holds beside the trainer's own files: counters, pass rate and the carried groups, without
pickle."""

import hashlib
import json
import os
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_dapo.algorithm.dynamic_sampling import PassRate
from megatron_dapo.coordinator.messages import ScoredGroup, ScoredResponse
from megatron_dapo.coordinator.sampler import SamplerState
from reward.messages import Verdict
from rollout.messages import FinishReason, Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where the run stands after `rollout_step` steps."""

    rollout_step: int
    optimizer_step: int
    weight_version: int
    sampler: SamplerState


def save_progress(progress: Progress, folder: Path) -> None:
    """Write `progress.json` (a line of JSON and its SHA-256) and `carried.npz` (whose format has checksums)."""
    carried = progress.sampler.carried
    responses = [response for group in carried for response in group.responses]
    content = {
        "rollout_step": progress.rollout_step,
        "optimizer_step": progress.optimizer_step,
        "weight_version": progress.weight_version,
        "cursor": progress.sampler.cursor,
        "pass_rate": asdict(progress.sampler.pass_rate),
        "carried": [_group_json(group) for group in carried],
    }
    text = json.dumps(content)
    (folder / "progress.json").write_text(f"{text}\n{_digest(text)}\n")
    empty = [np.zeros(0, np.int32)]
    np.savez(
        folder / "carried.npz",
        prompt_ids=np.concatenate([group.prompt_ids for group in carried] or empty),
        token_ids=np.concatenate([response.generation.token_ids for response in responses] or empty),
        log_probs=np.concatenate(
            [response.generation.log_probs for response in responses] or [np.zeros(0, np.float32)]
        ),
        weight_versions=np.concatenate([response.generation.weight_versions for response in responses] or empty),
    )
    for name in ("progress.json", "carried.npz"):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


class ProgressError(RuntimeError):
    """A file of a checkpoint that cannot be read. The message names it."""


def load_progress(folder: Path) -> Progress:
    """Read back what `save_progress` wrote, equal in every bit.

    Raises:
        ProgressError: a file is missing or damaged.
    """
    try:
        return _load_progress(folder)
    # What the readers make of a damaged file: no zip, no JSON, a key that is not there, too few elements.
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ProgressError(
            f"{folder}: progress.json or carried.npz is missing or damaged ({type(error).__name__}: {error})"
        ) from None


def _load_progress(folder: Path) -> Progress:
    text, digest = (folder / "progress.json").read_text().splitlines()
    if digest != _digest(text):
        raise ValueError("progress.json does not have its own checksum")
    content = json.loads(text)
    with np.load(folder / "carried.npz", allow_pickle=False) as arrays:
        reader = _Reader({name: arrays[name] for name in arrays.files})
    carried = tuple(_group(entry, reader) for entry in content["carried"])
    reader.check_finished()
    return Progress(
        rollout_step=content["rollout_step"],
        optimizer_step=content["optimizer_step"],
        weight_version=content["weight_version"],
        sampler=SamplerState(cursor=content["cursor"], pass_rate=PassRate(**content["pass_rate"]), carried=carried),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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

    def check_finished(self) -> None:
        """ValueError unless every array was read exactly to its end."""
        for name, at in self._at.items():
            if at != len(self._arrays[name]):
                raise ValueError(f"{name} has {len(self._arrays[name])} elements, progress.json names {at}")


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
