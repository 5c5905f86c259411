import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dapo.config.data import DataConfig
from megatron_dapo.data.prompts import DataError, prompt_at, read_prompts


class Letters:
    """A tokenizer of one id a character."""

    def encode(self, text, *, add_special_tokens):
        return [ord(letter) % 100 for letter in text]

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


def read(path, **options):
    return read_prompts(path, DataConfig(path=str(path), **{"template": "plain"} | options), Letters(), vocab_size=100)


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_json_lines_are_read_in_order_and_duplicates_counted(tmp_path):
    file = write(
        tmp_path / "p.jsonl",
        [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": 2}, {"prompt": "a", "answer": "1"}],
    )
    got = read(file)
    assert [(p.text, p.answer) for p in got.prompts] == [("a", "1"), ("b", "2")]
    assert (got.rows_read, got.duplicates) == (3, 1)
    assert got.prompts[1].place.endswith("p.jsonl:2")


def test_the_dapo_schema_in_parquet(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"q{i % 2}"}], "reward_model": {"ground_truth": str(i % 2)}}
        for i in range(6)
    ]
    file = tmp_path / "aime.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    got = read(file, template="chat", answer_key="reward_model.ground_truth")
    assert [p.text for p in got.prompts] == ["<user>q0<assistant>", "<user>q1<assistant>"]
    assert (got.rows_read, got.duplicates) == (6, 4)


def test_the_template_surrounds_the_prompt(tmp_path):
    file = write(tmp_path / "p.jsonl", [{"prompt": "1+1", "answer": "2"}])
    (prompt,) = read(file, template="Q {prompt} A").prompts
    assert prompt.text == "Q 1+1 A"
    assert prompt.ids.dtype == np.int32
    assert prompt.ids.tolist() == [ord(letter) % 100 for letter in "Q 1+1 A"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{broken\n", "not valid JSON"),
        ({"promt": "a", "answer": "1"}, "did you mean 'promt'"),
        ({"prompt": "a"}, "no column 'answer'"),
        ({"prompt": "", "answer": "1"}, "prompt is empty"),
        ({"prompt": "a", "answer": " "}, "expected a text or a number"),
        ({"prompt": "a", "answer": None}, "expected a text or a number"),
        ({"prompt": ["a"], "answer": "1"}, "no chat list"),
        ("[1]\n", "no column"),
    ],
)
def test_a_broken_row_stops_with_file_and_line_or_is_counted(tmp_path, row, expected):
    file = write(tmp_path / "p.jsonl", [{"prompt": "good", "answer": "1"}, row])
    with pytest.raises(DataError) as error:
        read(file)
    assert "p.jsonl:2" in str(error.value)
    assert expected in str(error.value)
    assert read(file, broken_rows="skip").broken == 1


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no such prompt file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="no usable prompt"):
        read(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(DataError, match="unknown kind"):
        read(write(tmp_path / "p.txt", ["a"]))


def test_a_long_prompt_stops_or_is_dropped(tmp_path):
    file = write(tmp_path / "p.jsonl", [{"prompt": "x" * 20, "answer": "1"}, {"prompt": "y", "answer": "1"}])
    with pytest.raises(DataError, match="20 tokens, more than data"):
        read(file, max_prompt_tokens=10)
    assert read(file, max_prompt_tokens=10, too_long="drop").too_long == 1


def test_the_order_is_a_new_permutation_every_epoch_and_depends_on_the_seed():
    first = [prompt_at(p, 50, 3) for p in range(50)]
    second = [prompt_at(p, 50, 3) for p in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == [prompt_at(p, 50, 3) for p in range(50)]
    assert first != [prompt_at(p, 50, 4) for p in range(50)]
