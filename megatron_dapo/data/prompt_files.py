"""The files behind a path of the config, and the records in them: JSON, CSV, parquet, Arrow; whole or in shards."""

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dapo.data.hub import begins

KINDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
_NAMED = ".jsonl, .json, .csv or .parquet"
REMEDIES = {
    ".csv": "save it as UTF-8 CSV with commas",
    ".json": "write an array of objects, or one object a line",
}


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
            raise DataError(
                f"{file}: no such prompt file{begins(file)}; set {setting} to a {_NAMED} file, a dataset's folder, or "
                "hf://datasets/OWNER/NAME/FILE of the Hugging Face hub"
            )
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
