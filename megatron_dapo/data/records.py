"""Prompt files -> rows: the files behind a path of the config (JSON, CSV, parquet, Arrow; whole or in shards), which
columns the config's keys name, and how a record is read."""

import csv
import json
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_dapo.config.data_config import ColumnsConfig, DataConfig, EvaluationConfig, Schema, SourceConfig
from megatron_dapo.data.hub import begins

KINDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
_NAMED = ".jsonl, .json, .csv or .parquet"
REMEDIES = {".csv": "save it as UTF-8 CSV with commas", ".json": "write an array of objects, or one object a line"}


class DataError(ValueError):
    """A prompt file that cannot be used. The message names the file, the line and the remedy."""

    exit_code = 2


def check_file(path: Path, setting: str) -> list[Path]:
    """The files that `path`, which the key `setting` names, stands for, without reading them.

    Args:
        path: a file, a pattern such as `train-*.parquet`, or the folder of a dataset saved by `save_to_disk`.

    Raises:
        DataError: one is missing, unreadable or of an unknown kind; the folder is no such dataset.
    """
    shards = [] if path.exists() else sorted(path.parent.glob(path.name))
    files = _dataset(path, setting) if path.is_dir() else shards or [path]
    for file in files:
        if not file.is_file():
            known = f"a {_NAMED} file, a dataset's folder, or hf://datasets/OWNER/NAME/FILE of the Hugging Face hub"
            raise DataError(f"{file}: no such prompt file{begins(file)}; set {setting} to {known}")
        if not os.access(file, os.R_OK):
            raise DataError(f"{file}: this user may not read it; change its permissions or name another file")
        if file.suffix not in KINDS:
            raise DataError(f"{file}: unknown kind {file.suffix!r}; use {_NAMED}")
    return files


def _dataset(folder: Path, setting: str) -> list[Path]:
    """The Arrow files of a dataset that Hugging Face's `save_to_disk` wrote, which state.json lists; else the only
    prompt file below the folder."""
    state, splits = folder / "state.json", folder / "dataset_dict.json"
    try:
        if state.is_file():
            return [folder / each["filename"] for each in json.loads(state.read_bytes())["_data_files"]]
        if splits.is_file():
            choice = [f"{folder}/{name}" for name in json.loads(splits.read_bytes())["splits"]]
        else:
            found = (file.relative_to(folder) for file in folder.rglob("*") if file.suffix in KINDS)
            choice = sorted(str(folder / file) for file in found if not file.as_posix().startswith("."))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{folder}: its {state.name} or {splits.name} is damaged ({error!r}); save it anew") from None
    if len(choice) == 1:
        return _dataset(Path(choice[0]), setting) if Path(choice[0]).is_dir() else [Path(choice[0])]
    wanted = f"one of: {', '.join(choice[:12])}{', ...' if len(choice) > 12 else ''}" if choice else f"a {_NAMED} file"
    raise DataError(f"{folder}: holds {'several sets of' if choice else 'no'} prompts; set {setting} to {wanted}")


def raw_rows(path: Path, setting: str) -> Iterator[tuple[str, Any]]:
    """(place, record) of each row; a line of JSON lines comes as its bytes.

    Raises:
        DataError: as `check_file`, or damaged.
    """
    for file in check_file(path, setting):
        at, lines = 0, file.suffix in (".jsonl", ".json") and not _is_array(file)
        try:
            for at, row in enumerate(_rows(file), start=1):
                if not lines or row.strip():
                    yield f"{file}:{at}" if lines else f"{file}: row {at}", row
        except Exception as error:  # csv, json and pyarrow raise anything for a damaged file
            remedy = REMEDIES.get(file.suffix, "get the file anew")
            raise DataError(f"{file}: damaged after row {at} ({error}); {remedy}") from None


def _rows(file: Path) -> Iterator[Any]:
    if file.suffix == ".csv":
        csv.field_size_limit(1 << 30)
        with file.open(encoding="utf-8-sig", newline="") as text:
            for row in csv.DictReader(text, strict=True):
                # An empty cell is None, as in the other kinds; a row with more cells than the header is no object.
                yield row[None] if None in row else {name: cell or None for name, cell in row.items()}
    elif file.suffix in (".parquet", ".arrow"):
        for batch in _batches(file):
            yield from batch.to_pylist()
    elif _is_array(file):
        yield from json.loads(file.read_bytes().decode("utf-8-sig"))
    else:
        with file.open("rb") as lines:
            yield from lines


def _batches(file: Path) -> Iterator[Any]:
    from pyarrow import ipc, memory_map, parquet

    if file.suffix == ".parquet":
        return parquet.ParquetFile(file).iter_batches()
    if file.open("rb").read(6) != b"ARROW1":  # the file format; `datasets` writes the stream format
        return ipc.open_stream(memory_map(str(file)))
    reader = ipc.open_file(memory_map(str(file)))
    return map(reader.get_batch, range(reader.num_record_batches))


def _is_array(file: Path) -> bool:
    with file.open("rb") as content:
        return file.suffix == ".json" and content.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


Chat = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a prompt file says of one problem. Row(prompt="1 + 1?", answer="2", source="gsm8k", verifier=None)."""

    prompt: str | Chat
    answer: str
    """Ground truth; an object or a list of the file as JSON."""
    structured: bool
    """Whether the file holds an object or a list there."""
    source: str
    verifier: str | None
    """Verifier that the row itself names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFile:
    """One file to read. PromptFile(path=Path("gsm8k.jsonl"), setting="data.mixture.0", columns=..., name="gsm8k")."""

    path: Path
    setting: str
    """Config key that named it, for messages."""
    columns: ColumnsConfig
    """Schema and config together."""
    name: str
    """Source of the rows that name none."""
    weight: float = 1.0
    verifier: str | None = None
    """Verifier of the rows that name none."""


SCHEMAS: dict[Schema, ColumnsConfig] = {
    "columns": ColumnsConfig(prompt_key="prompt", answer_key="answer"),
    "dapo": ColumnsConfig(prompt_key="prompt", answer_key="reward_model.ground_truth", source_key="data_source"),
    "gsm8k": ColumnsConfig(prompt_key="question", answer_key="answer", answer_after="####"),
}


def training_files(data: DataConfig) -> tuple[PromptFile, ...]:
    """The file of `data.path`, or those of `data.mixture` in their order."""
    if data.path is not None:
        return (_file(data, data.path, "data.path", data),)
    files = [(_file(data, each.path, f"data.mixture.{at}", each), each) for at, each in enumerate(data.mixture)]
    return tuple(replace(f, name=own.name or f.name, weight=own.weight, verifier=own.verifier) for f, own in files)


def heldout_files(data: DataConfig, evaluation: EvaluationConfig) -> tuple[PromptFile, ...]:
    """The file of `evaluation.path`, alone; none where it is not set."""
    return () if evaluation.path is None else (_file(data, evaluation.path, "evaluation.path", evaluation),)


def _file(data: DataConfig, path: str, setting: str, own: DataConfig | SourceConfig | EvaluationConfig) -> PromptFile:
    """`own`: the keys of this file; what they leave open is as `data` says."""
    below = resolve(data, SCHEMAS[data.schema]) if own.schema is None else SCHEMAS[own.schema]
    # What is asked and who answers is no matter of columns.
    columns = resolve(own, replace(below, environment=data.environment, instruction=data.instruction))
    return PromptFile(path=Path(path), setting=setting, columns=columns, name=Path(path).stem)


def resolve(config: ColumnsConfig, below: ColumnsConfig) -> ColumnsConfig:
    """`below`, but for the keys that the config gives."""
    given = {field.name: getattr(config, field.name) for field in fields(ColumnsConfig)}
    return replace(below, **{name: value for name, value in given.items() if value is not None})


def parse_row(record: Any, file: PromptFile, place: str) -> Row:
    """The columns of one record.

    Raises:
        DataError: not JSON, a column that is missing, empty or of the wrong type.
    """
    columns = file.columns
    if isinstance(record, bytes):
        try:
            record = json.loads(record.decode("utf-8-sig"))  # bytes alone: UTF-16 would be guessed, and cut wrong
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: not valid JSON ({error}); each line must be one JSON object") from None
    if not isinstance(record, dict):
        raise DataError(f"{place}: a JSON {type(record).__name__} and no object with columns (CSV: too many cells)")
    _check_columns(record, file, place)
    answer, structured = _answer(record, columns, place)
    source = file.name if columns.source_key is None else _text(record, columns.source_key, "source_key", place)
    verifier = None
    if columns.verifier_key is not None and _column(record, columns.verifier_key) is not None:
        verifier = _text(record, columns.verifier_key, "verifier_key", place)
    prompt = _prompt(record, columns, place)
    try:
        json.dumps([prompt, answer, source], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can write `\ud800`, UTF-8, and so any tokenizer, cannot
        half = f"{error.object[error.start]!a}, half a character (a lone surrogate)"
        raise DataError(f"{place}: holds {half}; fix the text") from None
    return Row(prompt=prompt, answer=answer, structured=structured, source=source, verifier=verifier)


def _prompt(record: Any, columns: ColumnsConfig, place: str) -> str | Chat:
    prompt = _column(record, columns.prompt_key)
    if isinstance(prompt, list):
        said = [(turn.get("role"), turn.get("content")) for turn in prompt if isinstance(turn, dict)]
        texts = [(r.strip(), c.strip()) for r, c in said if isinstance(r, str) and isinstance(c, str)]
        if len(texts) < len(prompt) or not all(role for role, _ in texts) or not any(content for _, content in texts):
            wanted = "{role, content}, both texts, or a turn is without a role, or no turn says anything"
            raise DataError(f"{place}: {columns.prompt_key} is no chat list of {wanted}")
    elif not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{place}: {columns.prompt_key} is empty or neither a text nor a chat list")
    if any("\0" in text for text in ([prompt] if isinstance(prompt, str) else (turn["content"] for turn in prompt))):
        raise DataError(f"{place}: {columns.prompt_key} holds a NUL character; remove it")
    return prompt


def _answer(record: Any, columns: ColumnsConfig, place: str) -> tuple[str, bool]:
    key = columns.answer_key
    answer = _column(record, key)
    if isinstance(answer, dict | list) and answer and columns.answer_after is None:
        try:
            return json.dumps(answer, ensure_ascii=False, allow_nan=False), True
        except (TypeError, ValueError) as error:  # parquet has columns of bytes, dates and decimals; and NaN is no JSON
            raise DataError(f"{place}: {key} holds what JSON cannot ({error}); store texts and numbers") from None
    if isinstance(answer, int | float | Decimal) and not isinstance(answer, bool) and math.isfinite(answer):
        answer = _numeral(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(f"{place}: {key} = {str(answer)[:80]!r}: expected a text or a number that is not empty")
    if columns.answer_after is None:
        return answer, False
    _, mark, after = answer.rpartition(columns.answer_after)
    if not mark or not after.strip():
        raise DataError(f"{place}: {key} holds no answer after {columns.answer_after!r} (answer_after)")
    return after.strip(), False


def _numeral(number: int | float | Decimal) -> str:
    """The number in plain digits, without a fraction of zeros: a column of integers becomes one of floats or decimals
    where a cell is empty or a scale is given, and `exact` compares texts. 42.0 is "42", 1e-05 "0.00001"."""
    if isinstance(number, int):
        return str(number)
    text = format(Decimal(repr(number)) if isinstance(number, float) else number, "f")
    text = text.rstrip("0").removesuffix(".") if "." in text else text
    return "0" if text == "-0" else text


def _text(record: Any, key: str, setting: str, place: str) -> str:
    text = _column(record, key)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{place}: {key} = {str(text)[:80]!r} ({setting}): expected a text that is not empty")
    return text.strip()


def _column(record: Any, key: str | None) -> Any:
    assert key is not None, "every schema names both columns of a problem"
    for part in [key] if key in record else key.split("."):
        record = record[part]
    return record


def _check_columns(record: Any, file: PromptFile, place: str) -> None:
    section, missing = file.setting.removesuffix(".path"), []
    for name in ("prompt_key", "answer_key", "source_key", "verifier_key"):
        key = getattr(file.columns, name)
        try:
            if key is not None:
                _column(record, key)
        except (KeyError, TypeError):
            missing.append(f"no column {key!r} ({section}.{name}); {nearest(key, record)}")
    if missing:
        raise DataError(f"{place}: {'; '.join(missing)}")


def nearest(word: str, known: Collection[str]) -> str:
    """What the user may have meant by a word that is not known."""
    near = get_close_matches(word, known, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"there are: {', '.join(sorted(known)) or 'none'}"
