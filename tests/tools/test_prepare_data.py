"""Prompt files made ready, as a user does it."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.processes import ROOT
from tests.tools.endpoint import endpoint
from tools.prepare_data import EXIT_INTERRUPTED, EXIT_NO_REPLY, EXIT_OK, EXIT_USAGE, answer_kind, main


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_convert_keeps_each_problem_once_and_says_what_became_of_the_others(tmp_path, capsys):
    rows = [
        {"question": "a  b", "answer": "#### 1"},
        {"question": "a b", "answer": "x #### 1"},
        {"question": "c", "answer": "#### 2"},
        {"question": "c", "answer": "#### 3"},
        {"question": "c", "answer": "#### 2"},
        {"question": "d", "answer": "four"},
        "{broken\n",
        *({"question": f"q{i}", "answer": f"#### {i}"} for i in range(20)),
    ]
    file = write(tmp_path / "g.jsonl", rows)
    out = tmp_path / "out"
    arguments = ["convert", file, "--schema", "gsm8k", "--out", str(out), "--heldout", "5"]
    assert main(arguments) == EXIT_USAGE
    assert "g.jsonl:6: answer holds no answer after '####'" in capsys.readouterr().err
    assert main([*arguments, "--broken-rows", "skip"]) == EXIT_OK
    train, heldout, aside = (read(out / f"{name}.jsonl") for name in ("train", "heldout", "aside"))
    assert (len(train), len(heldout)) == (16, 5)
    assert {row["prompt"] for row in (*train, *heldout)} == {"a  b", *(f"q{i}" for i in range(20))}
    assert [row["reason"].partition(":")[0] for row in aside] == ["contradiction", "broken", "broken"]
    page = (out / "report.md").read_text()
    for line in ("| read | 27 |", "| duplicates | 1 |", "| with contradicting answers | 3 |", "| broken | 2 |"):
        assert line in page
    assert "| integer | 21 |" in page


def test_a_missing_column_is_named_with_the_option_that_chooses_one(tmp_path, capsys):
    file = write(tmp_path / "p.jsonl", [{"question": "a", "answer": "1"}])
    assert main(["convert", file, "--out", str(tmp_path / "out")]) == EXIT_USAGE
    assert "no column 'prompt' (--prompt-key)" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["nowhere", "refuses system turns"])
def test_a_tokenizer_that_is_of_no_use_is_named_before_anything_is_written(tmp_path, capsys, model):
    folder = tmp_path / "model"
    if model != "nowhere":
        shutil.copytree(ROOT / "examples" / "quickstart" / "base", folder)
        (folder / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    file = write(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "1"}])
    assert main(["convert", file, "--out", str(tmp_path / "out"), "--tokenizer", str(folder)]) == EXIT_USAGE
    assert f"--tokenizer {folder}: " in capsys.readouterr().err
    assert not (tmp_path / "out" / "train.jsonl").exists()


def test_the_split_depends_on_seed_and_text_alone(tmp_path):
    rows = [{"prompt": f"q{i}", "answer": str(i)} for i in range(100)]

    def heldout(rows, seed):
        out = tmp_path / "out"
        file = write(tmp_path / "p.jsonl", rows)
        assert main(["convert", file, "--out", str(out), "--heldout", "10", "--seed", str(seed)]) == EXIT_OK
        return {row["prompt"] for row in read(out / "heldout.jsonl")}

    first = heldout(rows, 0)
    assert len(first) == 10
    assert heldout(rows[::-1], 0) == first != heldout(rows, 1)
    assert len(heldout(rows[1:], 0) & first) >= 9


def test_problems_of_another_file_are_kept_apart(tmp_path):
    train = write(tmp_path / "t.jsonl", [{"prompt": p, "answer": "1"} for p in "abc"])
    test = write(tmp_path / "e.jsonl", [{"prompt": " b\n", "answer": "1"}])
    assert main(["convert", train, "--out", str(tmp_path / "out"), "--exclude", test]) == EXIT_OK
    assert [row["prompt"] for row in read(tmp_path / "out" / "train.jsonl")] == ["a", "c"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("42", "integer"), ("-7", "negative integer"), ("1,080", "integer"), ("0.5", "number"),
        ("\\frac{1}{2}", "number"), ("50%", "number"), ("(1, 2)", "list"), ("2\\sqrt{3}", "expression"),
        ("x^2", "expression"), ("B", "choice"),
        ('{"a": 1}', "json"), ("Paris", "text"),
    ],
)  # fmt: skip
def test_kinds_of_answers(answer, kind):
    assert answer_kind(answer) == kind


def model(question, _):
    """Plays the model: knows 11/2 and 2 sqrt 3, fumbles the rest in ways that must be noticed."""
    if question.startswith("Below"):
        answer = re.search(r"\nAnswer: (.*)", question)[1]
        forms = {
            "\\frac{11}{2}": ("\\frac{m}{n}", {"m": 11, "n": 2}, "m + n"),
            "2\\sqrt{3}": ("a\\sqrt{b}", {"a": 2, "b": 3}, "a + b"),
            "\\frac{1}{3}": ("\\frac{m}{n}", {"m": 2, "n": 6}, "m + n"),
            "\\frac{2}{7}": ("\\frac{m}{n}", {"m": 3, "n": 7}, "m + n"),
            "5/9": ("\\frac{m}{n}", {"m": 5, "n": 9}, "m + n"),
            "7/9": ("\\frac{m}{n}", {"m": 7, "n": 9}, "m / n"),
            "8/9": ("\\frac{m}{n}", {"m": 8, "n": 9}, "m + n"),
        }
        if answer not in forms:
            return 200, None if answer == "the empty set" else "I would rather not."
        format_, values, integer = forms[answer]
        return 200, "```json\n" + json.dumps({"format": format_, "values": values, "integer": integer}) + "\n```"
    if question.startswith("Rewrite"):
        problem = question.rpartition("Problem: ")[2]
        told = " It is 8/9." if "eight" in problem else ""
        names = re.search(r"variables (.*?) are", question)[1]
        return 200, json.dumps({"problem": f"{problem} Written with {names}, find {names.replace(', ', ' + ')}.{told}"})
    if question.startswith("Solve"):
        return 200, f"Therefore {question.rpartition('Problem: ')[2]}"
    integers = {"eleven": "13", "root": "$5$", "five": "15"}
    return 200, next(number for word, number in integers.items() if word in question)


PROBLEMS = [
    {"prompt": "eleven halves", "answer": "\\frac{11}{2}"},
    {"prompt": "an integer", "answer": "1,080"},
    {"prompt": "root of twelve", "answer": "2\\sqrt{3}"},
    {"prompt": "not in lowest terms", "answer": "\\frac{1}{3}"},
    {"prompt": "another value", "answer": "\\frac{2}{7}"},
    {"prompt": "five ninths", "answer": "5/9"},
    {"prompt": "seven ninths", "answer": "7/9"},
    {"prompt": "eight ninths", "answer": "8/9"},
    {"prompt": "words", "answer": "the empty set"},
]


def test_integers_are_made_in_four_steps_and_the_rest_is_set_aside(tmp_path):
    file = write(tmp_path / "p.jsonl", PROBLEMS)
    out = tmp_path / "out"
    with endpoint(model) as (url, asked):
        arguments = ["integers", file, "--out", str(out), "--url", url, "--model", "m"]
        assert main(arguments) == EXIT_OK
        first = len(asked.questions)
        assert len(set(asked.questions)) == first == 8 + 4 + 3 + 3
        made = read(out / "train.jsonl")
        assert main(arguments) == EXIT_OK
        assert len(asked.questions) == first, "a question was asked twice"
        assert read(out / "train.jsonl") == made
    assert [(row["prompt"].split(" Written")[0], row["answer"]) for row in made] == [
        ("eleven halves", "13"),
        ("an integer", "1,080"),
        ("root of twelve", "5"),
    ]
    assert made[0]["original"]["answer"] == "\\frac{11}{2}"
    reasons = {row["prompt"]: row["reason"] for row in read(out / "aside.jsonl")}
    assert "2/6 is not in lowest terms" in reasons["not in lowest terms"]
    assert "is not known to equal the answer" in reasons["another value"]
    assert "the solution gives 15" in reasons["five ninths"]
    assert "gives 14" in reasons["five ninths"]
    assert "cannot be computed" in reasons["seven ninths"]
    assert reasons["eight ninths"] == "rewrite: states the answer"
    assert "no JSON" in reasons["words"]
    page = (out / "report.md").read_text()
    assert "| transformed | 2 |" in page
    assert "| set aside: extract | 4 |" in page
    for kind in ("number: 83.3% | 5", "expression: 0.0% | 0", "text: 100.0% | 1"):
        assert f"| set aside of the answers that are {kind} |" in page


def test_an_endpoint_that_stumbles_is_asked_again_and_one_that_is_gone_ends_it_resumably(tmp_path, capsys):
    file = write(tmp_path / "p.jsonl", PROBLEMS[:3])
    out = tmp_path / "out"

    def falls(question, number):
        return (500, "") if number == 1 else (401, "no more money") if number > 4 else model(question, number)

    arguments = ["integers", file, "--out", str(out), "--model", "m", "--concurrency", "1", "--deadline", "20"]
    with endpoint(falls) as (url, asked):
        assert main([*arguments, "--url", url]) == EXIT_NO_REPLY
        assert "status 401" in capsys.readouterr().err
        known = len(read(out / "replies.jsonl"))
        assert known == 4
    assert not (out / "train.jsonl").exists()
    with (out / "replies.jsonl").open("a") as journal:
        journal.write('{"key": "half a li')
    with endpoint(model) as (url, asked):
        assert main([*arguments, "--url", url]) == EXIT_OK
        assert len(asked.questions) == 8 - known
    assert [row["answer"] for row in read(out / "train.jsonl")] == ["13", "1,080", "5"]


def test_questions_go_side_by_side(tmp_path):
    rows = [{"prompt": f"eleven {i}", "answer": "\\frac{11}{2}"} for i in range(12)]
    file = write(tmp_path / "p.jsonl", rows)

    def slow(question, number):
        time.sleep(0.1)
        return model(question, number)

    with endpoint(slow) as (url, asked):
        arguments = ["integers", file, "--out", str(tmp_path / "out"), "--url", url, "--model", "m"]
        assert main([*arguments, "--concurrency", "6"]) == EXIT_OK
        assert 3 <= asked.most_under_way <= 6


def running(*arguments, file_bytes=-1):
    """The command in a process of its own, which may write files of that size."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tools.prepare_data", *arguments]

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job would ignore it

    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, text=True, preexec_fn=prepare
    )


def wait_until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_command_at_a_time_writes_into_a_folder_and_a_kill_loses_only_what_was_under_way(tmp_path, capsys):
    rows = [{"prompt": f"eleven {i}", "answer": "\\frac{11}{2}"} for i in range(12)]
    file, out = write(tmp_path / "p.jsonl", rows), tmp_path / "out"
    hold = threading.Event()

    def replies_to_twenty(question, number):
        if number >= 20:
            hold.wait(60)
        return model(question, number)

    with endpoint(replies_to_twenty) as (url, asked):
        arguments = ["integers", file, "--out", str(out), "--url", url, "--model", "m", "--concurrency", "3"]
        first = running(*arguments)
        wait_until(lambda: asked.under_way == 3 and len(asked.questions) == 23)
        assert main(arguments) == EXIT_USAGE
        assert f"--out {out}: another command writes there" in capsys.readouterr().err
        wait_until(lambda: len(read(out / "replies.jsonl")) == 20)
        first.kill()
        first.wait()
        first.stderr.close()
        hold.set()
        assert main(arguments) == EXIT_OK
    assert len(set(asked.questions)) == 48
    assert len(asked.questions) == 48 + 3, "what was under way at the kill, and nothing else, is asked for again"
    assert len(read(out / "train.jsonl")) == 12


@pytest.mark.parametrize("end", ["interrupt", "refusal"])
def test_replies_under_way_at_an_early_end_are_kept(tmp_path, end):
    rows = [{"prompt": f"eleven {i}", "answer": "\\frac{11}{2}"} for i in range(12)]
    file, out = write(tmp_path / "p.jsonl", rows), tmp_path / "out"
    hold = threading.Event()

    def slow(question, number):
        if end == "refusal" and number == 5:
            return 401, "no more money"
        if 3 <= number < 6:
            hold.wait(60)
        return model(question, number)

    with endpoint(slow) as (url, asked):
        arguments = ["integers", file, "--out", str(out), "--url", url, "--model", "m", "--concurrency", "3"]
        first = running(*arguments)
        wait_until(lambda: len(asked.questions) == 6 and asked.under_way == (3 if end == "interrupt" else 2))
        if end == "interrupt":
            first.send_signal(signal.SIGINT)
        assert "replies under way" in first.stderr.readline()
        hold.set()
        assert first.wait(60) == (EXIT_INTERRUPTED if end == "interrupt" else EXIT_NO_REPLY)
        first.stderr.close()
        assert len(asked.questions) == 6
        assert main(arguments) == EXIT_OK
    assert len(asked.questions) == 48 + (end == "refusal")
    assert len(set(asked.questions)) == 48


@pytest.mark.parametrize(
    ("option", "value"),
    [("--concurrency", "0"), ("--deadline", "nan"), ("--max-tokens", "-1"), ("--url", "http://127.0.0.1:99999/v1")],
)
def test_an_option_without_sense_is_refused_at_once(tmp_path, capsys, option, value):
    file = write(tmp_path / "p.jsonl", PROBLEMS)
    arguments = ["integers", file, "--out", str(tmp_path / "out"), "--model", "m", "--url", "http://127.0.0.1:1/v1"]
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, option, value])
    assert option in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["convert", file, "--out", str(tmp_path / "out"), "--heldout", "-1"])


def test_a_file_that_is_read_is_not_written_over(tmp_path, capsys):
    file = write(tmp_path / "train.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    before = (tmp_path / "train.jsonl").read_bytes()
    assert main(["convert", file, "--out", str(tmp_path)]) == EXIT_USAGE
    assert "would be written over" in capsys.readouterr().err
    assert (tmp_path / "train.jsonl").read_bytes() == before


def test_a_disk_that_is_full_ends_it_and_spoils_no_reply_that_was_kept(tmp_path):
    """In place of the disk, a limit on the size of a file: half a line is written, and then nothing."""
    rows = [{"prompt": f"eleven {i}", "answer": "\\frac{11}{2}"} for i in range(12)]
    file, out = write(tmp_path / "p.jsonl", rows), tmp_path / "out"
    with endpoint(model) as (url, asked):
        arguments = ["integers", file, "--out", str(out), "--url", url, "--model", "m", "--concurrency", "2"]
        first = running(*arguments, file_bytes=2500)
        assert "replies.jsonl" in first.communicate(timeout=60)[1]
        assert first.returncode == EXIT_USAGE
        assert not (out / "replies.jsonl").read_bytes().endswith(b"\n")
        assert main(arguments) == EXIT_OK
    assert len(set(asked.questions)) == 48
    assert len(asked.questions) <= 48 + 2
