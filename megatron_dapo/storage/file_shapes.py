"""The shapes of a run's small JSON files: another program, or another version, may have written them."""

from typing import Any

from pydantic import BaseModel, ValidationError


class Figures(BaseModel, extra="forbid", strict=True):
    """Fields of `statistics.Accuracy`."""

    accuracy: float
    low: float
    high: float
    n: int
    problems: int


class Answers(BaseModel, strict=True):
    """One way of answering the held-out problems."""

    figures: Figures
    texts: list[str] = []
    correct: list[bool] = []


class Before(BaseModel, strict=True):
    """heldout_before.json."""

    before: dict[str, Answers] = {}
    baseline: dict[str, Answers] | None = None


class Summary(BaseModel, strict=True):
    """summary.json."""

    rollout_steps: int = 0
    heldout: dict[str, dict[str, Figures] | None] | None = None
    examples: list[Any] | None = None


class Source(BaseModel, strict=True):
    """A prompt file."""

    sha256: str


class Data(BaseModel, strict=True):
    """The prompts that a run was begun with."""

    train: Source
    heldout: Source


class Trainer(BaseModel, strict=True):
    """What the trainer was."""

    device: str | None = None
    layout: dict[str, int | bool | None] | None = None
    parameters: int | None = None


class Manifest(BaseModel, strict=True):
    """manifest.json."""

    versions: dict[str, Any] | None = None
    host: dict[str, Any] | None = None
    trainer: Trainer | None = None
    model: dict[str, Any] | None = None
    data: Data | None = None
    command: list[Any] | None = None


SHAPES: dict[str, type[BaseModel]] = {"heldout_before.json": Before, "summary.json": Summary, "manifest.json": Manifest}


def misshapen(name: str, content: Any) -> str | None:
    """What is wrong with the content of the file `name`, and where in it; None where nothing is, or no shape is known.
    More keys than are known are nothing wrong."""
    if name not in SHAPES:
        return None
    try:
        SHAPES[name].model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg'].lower()}"
    return None
