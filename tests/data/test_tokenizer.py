"""A model folder whose tokenizer cannot be used: one error that names it, whatever the libraries raise."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from megatron_dapo.config import ConfigError
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
    with pytest.raises((TokenizerError, ConfigError), match=expected) as error:
        load_text_tools(folder)
    assert str(folder) in str(error.value)


def test_a_folder_without_any_file_of_a_tokenizer_is_said_to_have_none(folder):
    """transformers makes one up, of a single token."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).unlink()
    with pytest.raises(TokenizerError, match="no tokenizer files there"):
        load_text_tools(folder)


@given(
    text=st.text(
        alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("0123456789 \n+=Answer:</s>"))
    )
)
def test_a_tokenizer_that_names_its_class_is_the_one_that_auto_finds(text: str) -> None:
    base = ROOT / "examples" / "quickstart" / "base"
    light, full = load_text_tools(base).tokenizer, AutoTokenizer.from_pretrained(str(base))
    assert light.eos_token_id == full.eos_token_id
    for whole in (text, f"{text}</s>{text}"):
        ids = light.encode(whole, add_special_tokens=False)
        assert ids == full.encode(whole, add_special_tokens=False)
        for skip in (True, False):
            assert light.decode(ids, skip_special_tokens=skip) == full.decode(ids, skip_special_tokens=skip)
    chat = [{"role": "user", "content": text}]
    assert light.apply_chat_template(chat, tokenize=False) == full.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize(
    "template",
    [
        "{%- for m in messages %}\n  {%- if loop.first %}{{ bos_token }}{% endif %}\n<|{{ m.role }}|>"
        "\n{{ m.content | trim }}{{ eos_token }}{% endfor %}\n{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{{ messages[0]['content'] }}{{ missing }}{% set ns = namespace(n=0) %}{{ ns.n }}",
    ],
)
def test_its_chat_template_is_the_one_that_auto_finds(folder, template) -> None:
    (folder / "chat_template.jinja").write_text(template)
    light, full = load_text_tools(folder).tokenizer, AutoTokenizer.from_pretrained(str(folder))
    chat = [{"role": "user", "content": " <b>\u00e9 & 3 "}, {"role": "skip", "content": "x"}]
    for prompt in (True, False):
        rendered = light.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        assert rendered == full.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)


def test_whatever_class_the_folder_names_text_is_split_as_tokenizer_json_says(folder) -> None:
    for name, change in {
        "config.json": {"model_type": "qwen2"},
        "tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"},
    }.items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    text = "Tom has 12 pens .  3 + 4 = 7 ; Answer: 19\n"
    told = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert AutoTokenizer.from_pretrained(str(folder)).encode(text, add_special_tokens=False) != told
    assert load_text_tools(folder).tokenizer.encode(text, add_special_tokens=False) == told


def test_a_long_text_is_no_reason_to_warn(folder, caplog) -> None:
    tokenizer = load_text_tools(folder).tokenizer
    limit = json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"]
    assert len(tokenizer.encode("3 " * 500)) > limit
    assert not caplog.records


def test_a_template_may_refuse_a_chat(folder) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    with pytest.raises(TemplateError, match="no system"):
        load_text_tools(folder).tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)


@pytest.mark.parametrize("size", ["64", None, 64.5])
def test_a_vocabulary_size_that_is_no_whole_number(folder, size):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    with pytest.raises(TokenizerError, match="vocab_size"):
        load_text_tools(folder)


def with_ends(folder, *, tokenizer, generation, model):
    """The folder with other end tokens; None: not named."""
    for name, ids in (("generation_config.json", generation), ("config.json", model)):
        content = json.loads((folder / name).read_text())
        content.pop("eos_token_id", None)
        (folder / name).write_text(json.dumps(content | ({} if ids is None else {"eos_token_id": ids})))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    words = {ids: word for word, ids in json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].items()}
    settings["eos_token"] = None if tokenizer is None else words[tokenizer]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("tokenizer", "generation", "model", "stops"),
    [
        (2, 2, 2, (2,)),
        (2, [2, 5], 2, (2, 5)),  # the end of a turn and the end of text
        (5, [2, 5], 2, (5, 2)),
        (2, None, [2, 5], (2, 5)),
        (2, None, None, (2,)),
        (None, None, 5, (5,)),
    ],
)
def test_the_end_of_a_response_is_resolved_once(folder, tokenizer, generation, model, stops):
    with_ends(folder, tokenizer=tokenizer, generation=generation, model=model)
    assert load_text_tools(folder, ()).stop_token_ids == stops
    assert set(load_text_tools(folder).stop_token_ids) == set(stops)


@pytest.mark.parametrize(("tokenizer", "generation", "model"), [(2, 5, 5), (2, [5, 6], None), (2, None, 5), (2, 2, 6)])
def test_end_tokens_that_contradict_each_other_are_refused_unless_told(folder, tokenizer, generation, model):
    with_ends(folder, tokenizer=tokenizer, generation=generation, model=model)
    with pytest.raises(TokenizerError, match=r"to the tokenizer, .* model\.stop_token_ids") as error:
        load_text_tools(folder, ())
    assert str(folder) in str(error.value)
    assert load_text_tools(folder, (5, 6, 2)).stop_token_ids == (5, 6, 2)
    assert 2 in load_text_tools(folder).stop_token_ids  # a tool that has no config takes all of them


def test_what_the_engine_ends_at_anyway_has_to_be_told_too(folder):
    with_ends(folder, tokenizer=2, generation=[2, 5], model=2)
    with pytest.raises(TokenizerError, match=r"model\.stop_token_ids = \[2\]: SGLang ends a response also at \[5\]"):
        load_text_tools(folder, (2,))
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        load_text_tools(folder, (2, 5, 10**6))
