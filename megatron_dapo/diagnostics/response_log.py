"""Responses of an evaluation, on disk as soon as each is judged: a restart asks for the others only."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron_dapo.experience.evaluation import Answer, AnswerKey
from megatron_dapo.experience.groups import EarlierTurn
from megatron_dapo.storage.durable import FolderHeld, drop_torn_line, lock_folder, replace_file, whole_lines

SETTINGS, RESPONSES = "settings.json", "responses.jsonl"


class EvaluationError(RuntimeError):
    """An evaluation cannot be made, or its folder not be used. The message says why and what to do."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ResponseLog:
    """`responses.jsonl` in the folder of one evaluation."""

    known: dict[AnswerKey, Answer]
    _file: TextIO

    def add(self, key: AnswerKey, answer: Answer) -> None:
        """One more; with the system before this returns, so that the death of this process cannot lose it."""
        mode, problem, sample = key
        line = {"way": mode, "problem": problem, "sample": sample} | asdict(answer)
        if not answer.earlier:
            del line["earlier"]
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.known[key] = answer


@contextmanager
def response_log(folder: Path, settings: Mapping[str, Any]) -> Iterator[ResponseLog]:
    """The log of a folder, which one process writes at a time.

    Args:
        settings: what decides a response and its verdict; those of an earlier start must have been equal.

    Raises:
        EvaluationError: another process holds the folder, its responses were made with other settings, or one of them
            cannot be read.
        OSError: the folder cannot be written or locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(folder)
    except FolderHeld:
        raise EvaluationError(
            f"{folder}: another evaluation writes there; wait for it, or give another --out"
        ) from None
    try:
        _check_settings(folder, settings)
        known = _read(folder / RESPONSES)
        with (folder / RESPONSES).open("a", encoding="utf-8") as file:
            yield ResponseLog(known, file)
    finally:
        lock.release()


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.exists():
        replace_file(path, json.dumps(settings, indent=2) + "\n")
        return
    try:
        before = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise EvaluationError(f"{path} is damaged ({error}); remove {folder}, or give another --out") from None
    for key, now in json.loads(json.dumps(settings)).items():
        if before.get(key) != now:
            raise EvaluationError(
                f"{folder}: its responses were made with {key} = {before.get(key)}, not {now}; give another --out, or "
                "remove that folder"
            )


def _read(path: Path) -> dict[AnswerKey, Answer]:
    """What is there; a last line that a killed process did not finish is cut off."""
    if not path.exists():
        return {}
    drop_torn_line(path)
    known = {}
    for place, text in whole_lines(path):
        try:
            line = json.loads(text)
            key = (line.pop("way"), line.pop("problem"), line.pop("sample"))
            earlier = tuple(EarlierTurn(**turn) for turn in line.get("earlier", ()))
            known[key] = Answer(**line | {"versions": tuple(line["versions"]), "earlier": earlier})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluationError(
                f"{place}: no response of an evaluation ({error!r}); remove the line, it will be asked for again"
            ) from None
    return known
