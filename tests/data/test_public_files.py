"""Public data sets, where a folder `shared/data` beside the repository holds them."""

import json
from pathlib import Path

import pytest

from tools.prepare_data import main

FOLDER = Path(__file__).parents[3] / "shared" / "data"


def needed(name: str) -> Path:
    file = FOLDER / name
    if not file.is_file():
        pytest.skip(f"no {file}")
    return file


def test_aime_has_each_of_its_thirty_problems_once(tmp_path):
    assert main(["convert", str(needed("aime-2024.parquet")), "--schema", "dapo", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 30
    assert all(row["answer"].isdecimal() and row["source"] == "math_dapo" for row in rows)
    report = (tmp_path / "report.md").read_text()
    assert "| read | 960 |" in report
    assert "| duplicates | 930 |" in report


def test_every_answer_of_gsm8k_is_an_integer(tmp_path):
    assert main(["convert", str(needed("gsm8k_test.jsonl")), "--schema", "gsm8k", "--out", str(tmp_path)]) == 0
    report = (tmp_path / "report.md").read_text()
    assert "| train | 1319 |" in report
    assert "| integer | 1317 |" in report
    assert "| negative integer | 2 |" in report
