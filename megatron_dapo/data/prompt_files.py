"""The files behind a path of the config, and the records in them: JSON, CSV, parquet, Arrow; whole or in shards."""

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dapo.data.hub import download_hint

KINDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
_NAMED = ".jsonl, .json, .csv or .parquet"


class DataError(ValueError):
    """A prompt file that cannot be used. The message names the file, the line and the remedy."""

    exit_code = 2


def check_file(path: Path, setting: str) -> list[Path]:
    """The files that `path`, which the key `setting` names, stands for, without reading them.

    Args:
        path: a file, a pattern such as `train-*.parquet`, or the folder of a dataset saved by `save_to_disk`.

    Raises:
        DataError: one is missing, unreadable, empty or of an unknown kind; the folder is no such dataset.
    """
    shards = [] if path.exists() else sorted(path.parent.glob(path.name))
    files = _dataset(path, setting) if path.is_dir() else shards or [path]
    for file in files:
        if not file.is_file():
            more = download_hint(file, "dataset", setting)
            raise DataError(f"{file}: no such prompt file; set {setting} to a {_NAMED} file or a dataset{more}")
        if not os.access(file, os.R_OK):
            raise DataError(f"{file}: this user may not read it; change its permissions or name another file")
        if file.suffix not in KINDS:
            raise DataError(f"{file}: unknown kind {file.suffix!r}; use {_NAMED}")
        if file.stat().st_size == 0:
            raise DataError(f"{file}: no usable prompt, the file is empty")
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
        if file.suffix in (".parquet", ".arrow"):
            yield from _arrow_rows(file)
        elif file.suffix == ".csv":
            yield from _csv_rows(file)
        elif file.suffix == ".json" and _is_array(file):
            yield from _array_rows(file)
        else:
            with file.open("rb") as lines:
                yield from ((f"{file}:{at}", line) for at, line in enumerate(lines, start=1) if line.strip())


def _arrow_rows(file: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException, ipc, memory_map, parquet

    at = 0
    try:
        if file.suffix == ".parquet":
            batches = parquet.ParquetFile(file).iter_batches()
        elif file.open("rb").read(6) == b"ARROW1":  # the file format; `datasets` writes the stream format
            reader = ipc.open_file(memory_map(str(file)))
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = ipc.open_stream(memory_map(str(file)))
        for batch in batches:
            for row in batch.to_pylist():
                at += 1
                yield f"{file}: row {at}", row
    except (ArrowException, OSError) as error:  # a damaged page is an OSError
        raise DataError(f"{file}: damaged after row {at} ({error}); get the file anew") from None


def _csv_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """An empty cell is None, as in the other kinds; a row with more cells than the header has is no object."""
    csv.field_size_limit(1 << 30)
    at = 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            for at, row in enumerate(csv.DictReader(text, strict=True), start=1):
                cells: Any = row[None] if None in row else {name: cell or None for name, cell in row.items()}
                yield f"{file}: row {at}", cells
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file}: damaged after row {at} ({error}); save it as UTF-8 CSV with commas") from None


def _is_array(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _array_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not valid JSON ({error}); write an array of objects, or one object a line") from None
    yield from ((f"{file}: row {at}", row) for at, row in enumerate(rows, start=1))
