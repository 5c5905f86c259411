"""The shapes of a run's small JSON files: another program, or another version, may have written them."""

from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_dapo.monitor.statistics import Accuracy


class _Answers(BaseModel, strict=True):
    """One way of answering the held-out problems."""

    figures: Accuracy
    texts: list[str] = []
    correct: list[bool] = []


class _Before(BaseModel, strict=True):
    before: dict[str, _Answers] = {}
    baseline: dict[str, _Answers] | None = None


class _Summary(BaseModel, strict=True):
    rollout_steps: int = 0
    heldout: dict[str, dict[str, Accuracy] | None] | None = None
    examples: list[Any] | None = None


class _PromptFile(BaseModel, strict=True):
    sha256: str


class _Trainer(BaseModel, strict=True):
    layout: dict[str, int | bool | None] | None = None
    parameters: int | None = None


class _Manifest(BaseModel, strict=True):
    versions: dict[str, Any] | None = None
    trainer: _Trainer | None = None
    data: dict[str, _PromptFile] | None = None
    command: list[Any] | None = None


SHAPES: dict[str, type[BaseModel]] = {
    "heldout_before.json": _Before,
    "summary.json": _Summary,
    "manifest.json": _Manifest,
}


def misshapen(name: str, text: str) -> str | None:
    """What is wrong with the JSON of the file `name`, and where in it; None where nothing is, or no shape is known.
    More keys than are known are nothing wrong."""
    if name not in SHAPES:
        return None
    try:
        SHAPES[name].model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg'].lower()}"
    return None
