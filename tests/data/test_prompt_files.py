"""Every kind of prompt file gives the same rows; what cannot be read is named."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dapo.config.data_config import ColumnsConfig
from megatron_dapo.data.records import SCHEMAS, DataError, PromptFile, check_file, parse_row, raw_rows, resolve

ROWS = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": 'a, "b"\nc', "answer": "3"}]


def arrow(file, rows):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def saved(folder, *shards):
    """A folder as `datasets.Dataset.save_to_disk` leaves it (compared with datasets 5.2.0)."""
    folder.mkdir(parents=True)
    names = [f"data-{at:05}-of-{len(shards):05}.arrow" for at in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        arrow(folder / name, rows)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def records(path):
    rows = [row for _, row in raw_rows(path, "data.path")]
    return [json.loads(row.decode("utf-8-sig")) if isinstance(row, bytes) else row for row in rows]


def write_kind(folder, kind):
    file = folder / f"p.{kind}"
    if kind == "csv":
        file.write_text('\ufeffprompt,answer\n1 + 1?,2\n"a, ""b""\nc",3\n', encoding="utf-8")
    elif kind == "json":
        file.write_text("\ufeff\n " + json.dumps(ROWS, indent=2), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    elif kind == "arrow":
        arrow(file, ROWS)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_each_kind_gives_the_same_rows(tmp_path, kind):
    assert records(write_kind(tmp_path, kind)) == ROWS


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_column_may_have_a_dot_in_its_name(tmp_path, kind):
    """As pandas names what it has flattened."""
    row = {"prompt": "1 + 1", "reward_model.ground_truth": "2"}
    file = tmp_path / f"p.{kind}"
    if kind == "csv":
        file.write_text("prompt,reward_model.ground_truth\n1 + 1,2\n")
    else:
        file.write_text(json.dumps(row) + "\n")
    columns = resolve(ColumnsConfig(answer_key="reward_model.ground_truth"), SCHEMAS["columns"])
    prompts = PromptFile(path=file, setting="data.path", columns=columns, name="p")
    ((place, record),) = raw_rows(file, "data.path")
    assert parse_row(record, prompts, place).answer == "2"


def test_arrow_files_may_also_have_arrows_file_format(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(tmp_path / "p.arrow", table.schema) as writer:
        writer.write_table(table)
    assert records(tmp_path / "p.arrow") == ROWS


def test_a_json_file_may_also_have_one_object_a_line(tmp_path):
    file = write_kind(tmp_path, "jsonl").rename(tmp_path / "p.json")
    assert records(file) == ROWS


def test_an_empty_cell_is_none_and_places_count_rows(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text("prompt,answer,verifier\na,1,\nb,2,exact\nc,3\nd,4,exact,more\n")
    (first, second, third, fourth) = raw_rows(file, "data.path")
    assert first == (f"{file}: row 1", {"prompt": "a", "answer": "1", "verifier": None})
    assert second[1]["verifier"] == "exact"
    assert third[1]["verifier"] is None
    assert isinstance(fourth[1], list), "refused as a row, not cut to the header"


def test_a_saved_dataset_is_read_shard_by_shard(tmp_path):
    assert records(saved(tmp_path / "train", ROWS[:1], ROWS[1:])) == ROWS


def test_of_a_dataset_with_several_splits_one_must_be_named(tmp_path):
    saved(tmp_path / "both" / "train", ROWS)
    saved(tmp_path / "both" / "test", ROWS[:1])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"evaluation\.path to one of: .*both/train, .*both/test"):
        check_file(tmp_path / "both", "evaluation.path")
    assert records(tmp_path / "both" / "test") == ROWS[:1]
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert records(tmp_path / "both") == ROWS


def test_a_downloaded_repository_is_read_where_only_one_file_is_meant(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("...")
    write_kind(tmp_path / "data", "parquet")
    assert records(tmp_path) == ROWS
    write_kind(tmp_path / "data", "csv")
    with pytest.raises(DataError, match=r"data/p\.csv, .*data/p\.parquet"):
        check_file(tmp_path, "data.path")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no prompts"):
        check_file(tmp_path / "empty", "data.path")


def test_a_pattern_stands_for_shards_in_order(tmp_path):
    for at in (1, 0):
        (tmp_path / f"train-{at}.jsonl").write_text(json.dumps(ROWS[at]) + "\n")
    assert records(tmp_path / "train-*.jsonl") == ROWS
    with pytest.raises(DataError, match=r"test-\*\.jsonl: no such prompt file"):
        check_file(tmp_path / "test-*.jsonl", "data.path")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p.csv", b'prompt,answer\na,1\n"b,2\n', "p.csv: damaged after row 1"),
        ("p.csv", "prompt,answer\n\u00fc,1\n".encode("latin-1"), "save it as UTF-8"),
        ("p.json", b'[{"prompt": "a"},', "an array of objects, or one object a line"),
        ("p.arrow", b"no arrow", "damaged after row 0"),
        ("p.parquet", b"no parquet", "damaged after row 0"),
        ("state.json", b'{"_data_files": [5]}', "damaged"),
        ("dataset_dict.json", b"{", "damaged"),
        ("state.json", b'{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow: no such prompt file"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    path = tmp_path if name in ("state.json", "dataset_dict.json") else tmp_path / name
    with pytest.raises(DataError) as error:
        list(raw_rows(path, "data.path"))
    assert expected in str(error.value)
