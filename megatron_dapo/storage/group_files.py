"""Groups of responses as two files, `NAME.json` and `NAME.npz`: without pickle, equal in every bit, damage is noticed.

The JSON file is one line and its SHA-256; the line holds the SHA-256 of the file of arrays. A checkpoint holds its
carried groups so.
"""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dapo.experience.groups import EarlierTurn, ScoredGroup, ScoredResponse
from megatron_dapo.storage.durable import naming, sync
from reward.verdict import Verdict
from rollout.generation import FinishReason, Generation


class GroupFileError(RuntimeError):
    """A file that is missing or damaged. The message names it."""


def save_groups(folder: Path, name: str, groups: Sequence[ScoredGroup], extra: Mapping[str, Any]) -> None:
    """Returns when both files are on disk.

    Args:
        extra: the caller's own values, which JSON can hold.
    """
    generations = [response.generation for group in groups for response in group.responses]
    arrays: dict[str, Any] = {
        key: np.concatenate([np.zeros(0, kind), *(getattr(generation, key) for generation in generations)])
        for key, kind in ARRAYS.items()
    }
    prompts = np.concatenate([np.zeros(0, np.int32), *(group.prompt_ids for group in groups)])
    routed = [generation.routing for generation in generations if generation.routing is not None]
    arrays |= {"routing": np.concatenate(routed)} if routed else {}
    with naming(folder / f"{name}.npz"):
        np.savez(folder / f"{name}.npz", prompt_ids=prompts, **arrays)
    file, arrays_digest = folder / f"{name}.json", _digest_of(folder / f"{name}.npz")
    with naming(file), file.open("w") as stream:
        stream.write(f'{{"extra": {json.dumps(dict(extra))}, "groups": [')
        for at, group in enumerate(groups):  # one a time: `dumps` stops all threads, and texts may be some 100 MB
            stream.write((", " if at else "") + json.dumps(_group_json(group)))
        stream.write(f'], "arrays": "{arrays_digest}"}}')
        stream.flush()
        stream.write(f"\n{_digest_of(file)}\n")
    for ending in ("json", "npz"):
        sync(folder / f"{name}.{ending}")


def load_groups(folder: Path, name: str) -> tuple[tuple[ScoredGroup, ...], dict[str, Any]]:
    """Groups and `extra` of `save_groups`.

    Raises:
        GroupFileError: a file is missing or damaged.
    """
    try:
        text, digest = (folder / f"{name}.json").read_text().splitlines()
        if digest != hashlib.sha256(text.encode()).hexdigest():
            raise ValueError(f"{name}.json does not have its own checksum")
        content = json.loads(text)
        if content["arrays"] != _digest_of(folder / f"{name}.npz"):
            raise ValueError(f"{name}.npz does not have the checksum that {name}.json names")
        with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
            groups = _groups(content["groups"], arrays)
    # What the readers make of a damaged file: no zip, no JSON, a key that is not there, too few elements.
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise GroupFileError(f"{folder}: {name}.json or {name}.npz is missing or damaged ({error!r})") from None
    return groups, content["extra"]


def _digest_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


GROUP = ("position", "prompt_index", "weight_version")
RESPONSE = ("text", "reward_raw", "reward_shaped", "other_accuracy", "by_environment", "state")
"""Fields of a group and of a response that stand in the JSON file as they are."""

ARRAYS = {"token_ids": np.int32, "log_probs": np.float32, "weight_versions": np.int32}
"""Fields of a generation that stand in the file of arrays, one response behind the other."""


def _group_json(group: ScoredGroup) -> dict[str, object]:
    responses = [
        {
            "request_id": response.generation.request_id,
            "tokens": len(response.generation.token_ids),
            "given": response.generation.given,
            "finish_reason": response.generation.finish_reason,
            "verdict": asdict(response.verdict),
            "earlier": [asdict(turn) for turn in response.earlier],
        }
        | {key: getattr(response, key) for key in RESPONSE}
        | ({"routed": len(routing)} if (routing := response.generation.routing) is not None else {})
        for response in group.responses
    ]
    about = {key: getattr(group, key) for key in GROUP}
    return about | {"prompt_tokens": len(group.prompt_ids), "responses": responses}


def _groups(entries: Sequence[dict[str, Any]], arrays: Mapping[str, np.ndarray]) -> tuple[ScoredGroup, ...]:
    responses = [response for entry in entries for response in entry["responses"]]
    tokens = [response["tokens"] for response in responses]
    given = [sum(count for _, count in response["given"]) for response in responses]
    lengths = dict.fromkeys(ARRAYS, np.subtract(tokens, given)) | {"token_ids": tokens}
    prompts = _split(arrays["prompt_ids"], [entry["prompt_tokens"] for entry in entries])
    generated = zip(*(_split(arrays[key], lengths[key]) for key in ARRAYS), strict=True)
    routed = [int(response["routed"]) for response in responses if "routed" in response]
    routing = iter(_split(arrays["routing"], routed) if routed else ())
    scored = (_response(each, next(generated), next(routing) if "routed" in each else None) for each in responses)
    groups = []
    for entry, prompt_ids in zip(entries, prompts, strict=True):
        own = tuple(islice(scored, len(entry["responses"])))
        groups.append(ScoredGroup(**{key: entry[key] for key in GROUP}, prompt_ids=prompt_ids, responses=own))
    return tuple(groups)


def _split(array: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(lengths, dtype=int))[:-1]


def _response(entry: dict[str, Any], arrays: Iterable[np.ndarray], routing: np.ndarray | None) -> ScoredResponse:
    """`arrays`: its part of each of ARRAYS."""
    reason, generated = FinishReason(entry["finish_reason"]), dict(zip(ARRAYS, arrays, strict=True))
    given = tuple((first, tokens) for first, tokens in entry["given"])
    of = entry["request_id"]
    generation = Generation(request_id=of, finish_reason=reason, given=given, routing=routing, **generated)
    verdict, kept = Verdict(**entry["verdict"]), {key: entry[key] for key in RESPONSE}
    kept["earlier"] = tuple(EarlierTurn(**turn) for turn in entry["earlier"])
    return ScoredResponse(generation=generation, verdict=verdict, accuracy=verdict.accuracy, **kept)
