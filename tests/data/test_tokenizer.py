"""A model folder whose tokenizer cannot be used: one error that names it, whatever the libraries raise."""

import json
import shutil

import pytest

from megatron_dapo.data.tokenizer import TokenizerError, load_text_tools
from tests.processes import ROOT


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(ROOT / "examples" / "quickstart" / "base", tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", "", "cannot be loaded"),
        ("tokenizer.json", "{}", "cannot be loaded"),
        ("tokenizer.json", '{"version": ', "cannot be loaded"),
        ("tokenizer_config.json", "[]", "cannot be loaded"),
        ("generation_config.json", "{", "no JSON"),
        ("generation_config.json", '{"eos_token_id": "end"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [1, "end"]}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": -1}', "outside the vocabulary"),
    ],
)
def test_a_damaged_file_is_one_error_that_names_the_folder(folder, name, content, expected):
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=expected) as error:
        load_text_tools(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("size", ["64", None, 64.5])
def test_a_vocabulary_size_that_is_no_whole_number(folder, size):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    with pytest.raises(TokenizerError, match="vocab_size"):
        load_text_tools(folder)
