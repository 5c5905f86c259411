import gzip
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dapo.config import ConfigError, load_config
from megatron_dapo.config.data_config import DataConfig, EvaluationConfig, SourceConfig
from megatron_dapo.data.prompts import VerifierChoice, read_prompts
from megatron_dapo.data.records import DataError, heldout_files, training_files
from megatron_dapo.data.tokenizer import TextTools
from reward.config import RewardConfig


class Letters:
    """A tokenizer of one id a character."""

    def encode(self, text, *, add_special_tokens):
        return [ord(letter) % 100 for letter in text]

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


TEXT = TextTools(tokenizer=Letters(), stop_token_ids=(0,), vocab_size=100)


def read(path, *, reward=None, mixture=(), **options):
    options["mixture"] = tuple(SourceConfig(**source) for source in mixture)
    config = DataConfig(path=str(path) if path else None, **{"template": "plain"} | options)
    files = training_files(config)
    choice = VerifierChoice(reward or RewardConfig(), files)
    return read_prompts(files, config, choice, TEXT)


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
    assert (got.counts["rows"], got.counts["duplicates"]) == (3, 1)
    assert got.prompts[1].place.endswith("p.jsonl:2")
    assert (got.ordered, read(file, order="shuffled").ordered) == ("spaced", "shuffled")


def test_the_dapo_schema_in_parquet(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"q{i % 2}"}], "reward_model": {"ground_truth": str(i % 2)}}
        for i in range(6)
    ]
    file = tmp_path / "aime.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    got = read(file, template="chat", answer_key="reward_model.ground_truth")
    assert [p.text for p in got.prompts] == ["<user>q0<assistant>", "<user>q1<assistant>"]
    assert (got.counts["rows"], got.counts["duplicates"]) == (6, 4)


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
        ({"prompt": [{"role": "user", "content": None}], "answer": "1"}, "both texts"),
        ("[1]\n", "a JSON list and no object with columns"),
        ("5\n", "a JSON int and no object"),
        ({"prompt": "a \ud800 b", "answer": "1"}, "holds '\\ud800', half a character"),
        ({"prompt": [{"role": "user", "content": "\udc00"}], "answer": "1"}, "holds '\\udc00'"),
        ({"prompt": "a \0 b", "answer": "1"}, "prompt holds a NUL character"),
        ({"prompt": [{"role": "user", "content": "\0q"}], "answer": "1"}, "prompt holds a NUL character"),
        ({"prompt": "a", "answer": "1\ud800"}, "holds '\\ud800'"),
        ({"prompt": [{"role": "", "content": "a"}], "answer": "1"}, "without a role"),
        ({"prompt": [{"role": "user", "content": " "}], "answer": "1"}, "no turn says anything"),
        ('{"prompt": "a", "answer": 1e400}\n', "expected a text or a number"),
        ('{"prompt": "a", "answer": [NaN]}\n', "holds what JSON cannot"),
        ({"prompt": "a", "answer": True}, "expected a text or a number"),
    ],
)
def test_a_broken_row_stops_with_file_and_line_or_is_counted(tmp_path, row, expected):
    file = write(tmp_path / "p.jsonl", [{"prompt": "good", "answer": "1"}, row])
    with pytest.raises(DataError) as error:
        read(file)
    assert "p.jsonl:2" in str(error.value)
    assert expected in str(error.value)
    assert str(error.value).endswith("; data.broken_rows=skip leaves such rows out")
    assert read(file, broken_rows="skip").counts["broken"] == 1


def test_all_columns_that_are_missing_are_named_by_their_keys(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text("question,solution,topic\na,1,b\n")
    with pytest.raises(DataError) as error:
        read(file)
    for told in ("p.csv: row 1: no column 'prompt' (data.prompt_key)", "no column 'answer' (data.answer_key)"):
        assert told in str(error.value)


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no such prompt file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="no usable prompt"):
        read(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(DataError, match="unknown kind"):
        read(write(tmp_path / "p.txt", ["a"]))


def test_parquet_columns_that_json_cannot_hold_are_broken_rows(tmp_path):
    file = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "answer": [[b"1"]]}), file)
    with pytest.raises(DataError, match=r"p\.parquet: row 1: answer holds what JSON cannot"):
        read(file)
    with pytest.raises(DataError, match="1 broken"):
        read(file, broken_rows="skip")


def test_numbers_become_plain_digits_exactly(tmp_path):
    """A column of integers comes as floats where a cell was empty, and as decimals out of a database."""
    file = tmp_path / "p.parquet"
    decimals = [Decimal(text) for text in ("42.00", "-0.50", "12345678901234567890123456789012.30", "0.00", "-0.00")]
    pq.write_table(pa.table({"prompt": list("abcde"), "answer": pa.array(decimals, pa.decimal128(38, 2))}), file)
    assert [p.answer for p in read(file).prompts] == ["42", "-0.5", "12345678901234567890123456789012.3", "0", "0"]
    rows = [{"prompt": f"q{value}", "answer": value} for value in (42.0, 0.1, 1e22, 1e-05, -0.0, -7, 100, 2**70)]
    got = [p.answer for p in read(write(tmp_path / "p.jsonl", rows)).prompts]
    assert got == ["42", "0.1", "1" + "0" * 22, "0.00001", "0", "-7", "100", str(2**70)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b'{"prompt": "a", "answer": "1"}\n'), "not valid JSON"),
        (b"PAR1", "not valid JSON"),
        ('{"prompt": "\u6c42", "answer": "1"}\n'.encode("utf-16"), "not valid JSON"),
        ('\n{"prompt": "\u6c421", "answer": "1"}\n'.encode("utf-16-le")[1:-1], "not valid JSON"),
        (b'[{"prompt": "a",\n"answer": "1"}]', "each line must be one JSON object"),
    ],
    ids=["gzip", "parquet", "utf-16", "from the second line of utf-16", "json list"],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content, said):
    file = tmp_path / "p.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=said):
        read(file)


def test_a_byte_order_mark_and_the_line_ends_of_windows_are_no_fault(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n\r\n{"prompt": "b", "answer": "2"}\r\n')
    assert [(p.text, p.answer) for p in read(file).prompts] == [("a", "1"), ("b", "2")]


def test_a_damaged_page_names_the_file(tmp_path):
    file = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": ["1", "2"]}), file)
    content = bytearray(file.read_bytes())
    content[4:40] = b"\xff" * 36
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"p\.parquet: damaged after row 0"):
        read(file)


def test_a_long_prompt_stops_or_is_dropped(tmp_path):
    file = write(tmp_path / "p.jsonl", [{"prompt": "x" * 20, "answer": "1"}, {"prompt": "y", "answer": "1"}])
    with pytest.raises(DataError, match="20 tokens, more than data"):
        read(file, max_prompt_tokens=10)
    assert read(file, max_prompt_tokens=10, too_long="drop").counts["too_long"] == 1


def test_gsm8k_and_a_mapping_of_columns(tmp_path):
    row = {"question": "2 + 3?", "answer": "2 #### is 5.\n#### 5 "}
    (prompt,) = read(write(tmp_path / "g.jsonl", [row]), schema="gsm8k").prompts
    assert (prompt.text, prompt.answer, prompt.source) == ("2 + 3?", "5", "g")
    mapped = write(tmp_path / "m.jsonl", [{"q": {"text": "a"}, "a": "so: 7", "from": "exam"}])
    keys = {"prompt_key": "q.text", "answer_key": "a", "answer_after": "so:", "source_key": "from"}
    (prompt,) = read(mapped, **keys).prompts
    assert (prompt.text, prompt.answer, prompt.source) == ("a", "7", "exam")


@pytest.mark.parametrize("answer", ["5", "####", "#### ", 5])
def test_a_gsm8k_row_without_an_answer_is_broken(tmp_path, answer):
    file = write(tmp_path / "g.jsonl", [{"question": "a", "answer": answer}])
    with pytest.raises(DataError, match=r"g\.jsonl:1: answer holds no answer after '####'"):
        read(file, schema="gsm8k")


def test_the_dapo_schema_by_name(tmp_path):
    row = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1"}, "data_source": "aime"}
    (prompt,) = read(write(tmp_path / "d.jsonl", [row]), schema="dapo").prompts
    assert (prompt.text, prompt.answer, prompt.source) == ("<user>q<assistant>", "1", "aime")


def test_duplicates_that_contradict_each_other_are_counted(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}]
    got = read(write(tmp_path / "p.jsonl", rows))
    assert (got.counts["duplicates"], got.counts["contradictions"]) == (2, 1)
    assert "2 duplicates (1 with another answer)" in got.summary()


def test_games_with_the_same_words_differ_by_what_is_to_be_found(tmp_path):
    rows = [{"prompt": "guess", "answer": answer} for answer in ("1", "2", "1")]
    got = read(write(tmp_path / "p.jsonl", rows), environment="guess:step")
    assert ([prompt.answer for prompt in got.prompts], got.counts["duplicates"]) == (["1", "2"], 1)


def test_a_game_may_have_a_ground_truth_that_no_verifier_reads(tmp_path):
    file = write(tmp_path / "p.jsonl", [{"prompt": "play", "answer": {"board": [1, 2]}}])
    with pytest.raises(DataError, match=r"wants a text; an environment that ends every episode itself may have none"):
        read(file, environment="guess:step")
    (prompt,) = read(file, environment="guess:step", reward=RewardConfig(verifier="none")).prompts
    assert (prompt.verifier, json.loads(prompt.answer)) == ("none", {"board": [1, 2]})
    for verifier in ("none", "none + 0.5 * choice"):
        with pytest.raises(ConfigError, match=r"p\.jsonl:1: verifier none is for prompts with an environment"):
            read(file, reward=RewardConfig(verifier=verifier))


@pytest.mark.parametrize("answer", ["NaN", "Infinity", "1e999", "true", "{}", "[]"])
def test_what_is_no_answer_is_broken(tmp_path, answer):
    file = write(tmp_path / "p.jsonl", [f'{{"prompt": "a", "answer": {answer}}}\n'])
    with pytest.raises(DataError, match=r"p\.jsonl:1: answer"):
        read(file)


def test_a_mixture_has_spans_and_one_hash(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"prompt": p, "answer": "1"} for p in "xyz"])
    b = write(tmp_path / "b.jsonl", [{"question": p, "answer": "#### 2"} for p in "zuv"])
    mixture = [{"path": str(a), "weight": 3.0}, {"path": str(b), "schema": "gsm8k", "name": "gsm"}]
    got = read(None, mixture=mixture)
    assert [(s.start, s.count, s.weight) for s in got.spans] == [(0, 3, 3.0), (3, 2, 1.0)]
    assert [p.text for p in got.prompts] == list("xyzuv")
    assert got.counts["duplicates"] == 1
    assert got.content_hash == read(None, mixture=mixture).content_hash
    mixture[0]["weight"] = 2.0
    assert got.content_hash != read(None, mixture=mixture).content_hash
    with pytest.raises(DataError, match=r"b\.jsonl: no usable prompt \(3 rows read, 3 duplicates"):
        read(None, mixture=[*mixture, mixture[1]])


def test_each_sample_has_the_verifier_that_its_row_file_or_source_names(tmp_path):
    rows = [
        {"prompt": "a", "answer": "1", "by": "exact", "from": "exam"},
        {"prompt": "b", "answer": "B", "by": None, "from": "quiz"},
        {"prompt": "c", "answer": "1", "by": None, "from": "exam"},
        {"prompt": "d", "answer": {"equals": [1]}, "by": "json", "from": "exam"},
    ]
    file = write(tmp_path / "p.jsonl", rows)
    keys = {"verifier_key": "by", "source_key": "from"}
    got = read(file, reward=RewardConfig(by_source={"quiz": "choice"}), **keys)
    assert [p.verifier for p in got.prompts] == ["exact", "choice", "robust", "json"]
    assert "judged: 1 by choice, 1 by exact, 1 by json, 1 by robust" in got.summary()
    other = write(tmp_path / "q.jsonl", [{"prompt": "z", "answer": "B"}])
    mixture = [{"path": str(file), **keys}, {"path": str(other), "verifier": "choice"}]
    got = read(None, reward=RewardConfig(by_source={"quiz": "choice"}), mixture=mixture)
    assert [p.verifier for p in got.prompts] == ["exact", "choice", "robust", "json", "choice"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"by": "robst"}, "did you mean 'robust'"),
        ({"by": "os:system"}, "a data file may not choose code"),
        ({"by": "robust + 0.1 * os:system"}, "'os:system' is code that only the file names"),
        ({"by": "robust + 0.1 * choic"}, "did you mean 'choice'"),
        ({"by": "robust + choice"}, "is not known"),
        ({"by": "robust + 0.1 * choice", "answer": "12"}, "not the letter"),
        ({"by": 3}, "expected a text"),
        ({"by": "choice", "answer": "Paris"}, "not the letter"),
        ({"by": "json", "answer": '{"schema": {"type": 7}}'}, "schema"),
        ({"by": "robust", "answer": "$$"}, "holds no answer"),
        ({"by": "robust", "answer": [1]}, "wants a text"),
    ],
)
def test_a_verifier_or_a_truth_that_cannot_be_is_refused_with_file_and_line(tmp_path, row, expected):
    file = write(
        tmp_path / "p.jsonl", [{"prompt": "a", "answer": "1", "by": None}, {"prompt": "b", "answer": "1"} | row]
    )
    with pytest.raises((ConfigError, DataError)) as error:
        read(file, verifier_key="by")
    assert "p.jsonl:2" in str(error.value)
    assert expected in str(error.value)


def test_skipping_broken_rows_does_not_skip_an_unknown_verifier(tmp_path):
    file = write(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "1", "by": "robst"}])
    with pytest.raises(ConfigError, match="did you mean"):
        read(file, verifier_key="by", broken_rows="skip")
    bad = [{"prompt": "a", "answer": "1", "by": None}, {"prompt": "b", "answer": "x", "by": "choice"}]
    assert (
        read(
            write(tmp_path / "q.jsonl", [*bad, {"prompt": "c", "answer": "one two", "by": "choice"}]),
            verifier_key="by",
            broken_rows="skip",
        ).counts["broken"]
        == 1
    )


def test_code_that_the_config_names_may_be_named_by_a_row(tmp_path):
    own = "tests.reward.hostile:judge"
    file = write(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "1", "by": own}])
    for named in (own, f"robust + 0.5 * {own}"):
        got = read(file, verifier_key="by", reward=RewardConfig(by_source={"p": named}))
        assert got.prompts[0].verifier == own


def test_a_source_that_no_row_has_is_named(tmp_path):
    file = write(tmp_path / "gsm8k.jsonl", [{"prompt": "a", "answer": "1"}])
    config = DataConfig(path=str(file), template="plain")
    choice = VerifierChoice(RewardConfig(by_source={"gsm8": "exact"}), training_files(config))
    read_prompts(training_files(config), config, choice, TEXT)
    with pytest.raises(ConfigError, match=r"by_source\.gsm8: no prompt has this source; did you mean 'gsm8k'\?"):
        choice.check_sources()


def test_each_file_has_its_environment_and_the_hash_knows_it(tmp_path):
    one = write(tmp_path / "a.jsonl", [{"prompt": "1+1", "answer": "2"}])
    chat = write(tmp_path / "b.jsonl", [{"prompt": [{"role": "user", "content": "2+2"}], "answer": "4"}])
    mixture = [{"path": str(one)}, {"path": str(chat), "environment": "own:other"}]
    got = read(None, mixture=mixture, environment="own:step")
    assert [(prompt.environment, prompt.chat) for prompt in got.prompts] == [("own:step", False), ("own:other", True)]
    plain, alone = read(one), read(one, environment="own:step")
    assert (plain.prompts[0].environment, plain.content_hash) == (None, read(one).content_hash)
    assert alone.content_hash not in (plain.content_hash, read(one, environment="own:other").content_hash)


def test_another_schema_changes_columns_alone():
    data = DataConfig(path="p.jsonl", environment="own:step", instruction="End with {form}", source_key="of")
    for given, environment, instruction, source in (
        ({"schema": "gsm8k"}, "own:step", "End with {form}", None),
        ({"environment": "own:other", "instruction": "Be brief"}, "own:other", "Be brief", "of"),
        ({"schema": "dapo", "instruction": "Be brief"}, "own:step", "Be brief", "data_source"),
    ):
        (file,) = heldout_files(data, EvaluationConfig(path="h.jsonl", **given))
        columns = file.columns
        assert (columns.environment, columns.instruction, columns.source_key) == (environment, instruction, source)


def test_an_instruction_names_the_form_that_the_rows_verifier_reads(tmp_path):
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": [{"role": "user", "content": "2+2"}], "answer": "4"}]
    file = write(tmp_path / "p.jsonl", rows)
    by_form = RewardConfig(verifier="robust:#### {answer}")
    got = read(file, reward=by_form, instruction="End with {form}")
    assert [prompt.text for prompt in got.prompts] == [
        "1+1\n\nEnd with #### ANSWER",
        "<user>2+2\n\nEnd with #### ANSWER<assistant>",
    ]
    assert read(file, instruction="{form}").prompts[0].text == "1+1\n\nAnswer: ANSWER"
    code = write(tmp_path / "c.jsonl", [{"prompt": "f", "answer": {"tests": "assert f"}}])
    with pytest.raises(ConfigError, match=r"verifier code has no \{form\}"):
        read(code, reward=RewardConfig(verifier="code"), instruction="End with {form}")


def test_a_small_models_prompts_may_take_what_the_context_leaves(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "run: {dir: r, rollout_steps: 1}\nmodel: {path: m, context_length: 1024}\ndata: {path: p.jsonl}\n"
        "evaluation: {path: h.jsonl}\nrollout: {max_new_tokens: 512}\nalgorithm: {overlong: {shape: none}}\n"
    )
    assert load_config(file).longest_prompt == 512
    assert load_config(file, ["data.max_prompt_tokens=64"]).longest_prompt == 64
    with pytest.raises(ConfigError, match="context_length = 1024"):
        load_config(file, ["rollout.max_new_tokens=1024"])
