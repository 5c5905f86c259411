"""Which file, which column: the config's keys resolved to what is read of each prompt file."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_dapo.config.data_config import ColumnsConfig, DataConfig, EvaluationConfig, Schema


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Columns of one file, schema and config together. Columns(prompt_key="question", ..., answer_after="####")."""

    prompt_key: str
    answer_key: str
    answer_after: str | None = None
    source_key: str | None = None
    verifier_key: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFile:
    """One file to read. PromptFile(path=Path("gsm8k.jsonl"), setting="data.mixture.0", columns=..., name="gsm8k")."""

    path: Path
    setting: str
    """Config key that named it, for messages."""
    columns: Columns
    name: str
    """Source of the rows that name none."""
    weight: float = 1.0
    verifier: str | None = None
    """Verifier of the rows that name none."""


SCHEMAS: dict[Schema, Columns] = {
    "columns": Columns(prompt_key="prompt", answer_key="answer"),
    "dapo": Columns(prompt_key="prompt", answer_key="reward_model.ground_truth", source_key="data_source"),
    "gsm8k": Columns(prompt_key="question", answer_key="answer", answer_after="####"),
}


def training_files(data: DataConfig) -> tuple[PromptFile, ...]:
    """The file of `data.path`, or those of `data.mixture` in their order."""
    columns = resolve(data, SCHEMAS[data.schema])
    if data.path is not None:
        path = Path(data.path)
        return (PromptFile(path=path, setting="data.path", columns=columns, name=path.stem),)
    return tuple(
        PromptFile(
            path=Path(source.path),
            setting=f"data.mixture.{number}",
            columns=resolve(source, SCHEMAS[source.schema] if source.schema else columns),
            name=source.name or Path(source.path).stem,
            weight=source.weight,
            verifier=source.verifier,
        )
        for number, source in enumerate(data.mixture)
    )


def heldout_files(data: DataConfig, evaluation: EvaluationConfig) -> tuple[PromptFile, ...]:
    """The file of `evaluation.path`, alone."""
    below = SCHEMAS[evaluation.schema] if evaluation.schema else resolve(data, SCHEMAS[data.schema])
    path = Path(evaluation.path)
    return (PromptFile(path=path, setting="evaluation.path", columns=resolve(evaluation, below), name=path.stem),)


def resolve(config: ColumnsConfig, below: Columns) -> Columns:
    """`below`, but for the keys that the config gives."""
    given = asdict(config)
    return replace(below, **{name: given[name] for name in Columns.__slots__ if given[name] is not None})
