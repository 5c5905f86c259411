"""`python -m reward grade`, run as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reward.grade import parse_line
from reward.verdict import VerifierError
from tests.reward.conftest import load_cases

ROOT = Path(__file__).parents[2]


def grade(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "reward", "grade", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, env=environment, check=False)


LINES: list[tuple[bytes, int, str | None]] = [
    (b'{"response": "Answer: 42", "ground_truth": "42"}', 1, None),
    (b'{"response": "Answer: 42.0", "ground_truth": 42, "extra": [1]}', 1, None),
    (b'{"response": "Answer: 42.0", "ground_truth": "42", "verifier": "exact"}', 0, None),
    (b'{"response": "Answer: \\\\sqrt{1764}", "ground_truth": "42", "verifier": null}', 1, None),
    (b"", 0, "not a JSON object"),
    (b"   ", 0, "not a JSON object"),
    (b"not json", 0, "not a JSON object"),
    (b'{"response": "Answer: 42", "ground_truth": "42"', 0, "not a JSON object"),
    (b"[1, 2]", 0, "not a JSON object"),
    (b'"Answer: 42"', 0, "not a JSON object"),
    (b"null", 0, "not a JSON object"),
    (b'{"response": null, "ground_truth": "42"}', 0, "response = None: Input should be a valid string"),
    (b'{"response": 42, "ground_truth": "42"}', 0, None),
    (b'{"response": ["Answer: 42"], "ground_truth": "42"}', 0, "response = ['Answer: 42']"),
    (b'{"ground_truth": "42"}', 0, "response = "),
    (b'{"response": "Answer: 42"}', 0, "Field required"),
    (b'{"response": "Answer: 42", "ground_truth": null}', 0, "ground_truth"),
    (b'{"response": "Answer: 42", "ground_truth": ""}', 0, "ground truth"),
    (b'{"response": "Answer: 42", "ground_truth": "42", "verifier": "robst"}', 0, "did you mean 'robust'"),
    (b'{"response": "true", "ground_truth": "1", "verifier": "os:system"}', 0, "may not choose code to run"),
    (b'{"response": "Answer: B", "ground_truth": "B", "verifier": "choice"}', 1, None),
    (b'{"response": "{\\"x\\": 1}", "ground_truth": {"equals": {"x": 1.0}}, "verifier": "json"}', 1, None),
    (b'{"response": "{\\"x\\": 2}", "ground_truth": {"equals": {"x": 1}}, "verifier": "json"}', 0, None),
    (b'{"response": "[1]", "ground_truth": {"equals": [' + b"1" * 5000 + b']}, "verifier": "json"}', 0, "4300 digits"),
    (b'{"response": "Answer: 1", "ground_truth": {"equals": 1}}', 0, "ground_truth: verifier robust takes a string"),
    (b'{"response": "Answer: \\ud83d 42 \\ud83d", "ground_truth": "42"}', 1, None),
    (b'{"response": "Answer: 42\xff\xfe", "ground_truth": "42"}', 1, None),
    (b"\xff\xfe\x00", 0, "not a JSON object"),
    (b"\x00", 0, "not a JSON object"),
    (b'\xef\xbb\xbf{"response": "Answer: 42", "ground_truth": "42"}', 1, None),
    (b'{"response": "Answer: 1", "ground_truth": ' + b"1" * 5000 + b"}", 0, "ground truth"),
    (b'{"response": "Answer: ' + b"9" * 1_000_000 + b'", "ground_truth": "9"}', 0, None),
    (b"[" * 100_000, 0, "not a JSON object"),
    (b'{"response": "Answer: 9^{9^{9^9}}", "ground_truth": "9"}', 0, None),
    (b'{"response": "x", "ground_truth": "1", "prompt": true}', 0, "prompt"),
    (b'{"response": "Answer: 84/2", "ground_truth": "42", "prompt": "What is 84/2?"}', 0, None),
    (b'{"response": "Answer: 84/2", "ground_truth": "42", "prompt": [{"role": "user", "content": "84/2?"}]}', 0, None),
    (b'{"response": "Answer: 42", "ground_truth": NaN}', 0, "ground_truth"),
    (b'{"response": "Answer: 42", "ground_truth": "42"}\r', 1, None),
]


def test_one_verdict_a_line_whatever_the_lines_hold(tmp_path):
    source = tmp_path / "responses.jsonl"
    source.write_bytes(b"\n".join(line for line, _, _ in LINES))
    result = grade(str(source))
    assert result.returncode == 0, result.stderr
    verdicts = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(verdicts) == len(LINES)
    for (line, accuracy, error), verdict in zip(LINES, verdicts, strict=True):
        assert verdict.keys() == {"accuracy", "extracted", "rule", "seconds", "error"}
        assert verdict["accuracy"] == accuracy, line[:100]
        assert (error or "") in (verdict["error"] or ""), line[:100]
        assert error is not None or verdict["error"] is None, (line[:100], verdict)
        assert isinstance(verdict["accuracy"], int)
        assert isinstance(verdict["seconds"], float)
    assert f"{len(LINES)} lines".encode() in result.stderr


def test_a_weighted_sum_shows_its_parts(tmp_path):
    source = tmp_path / "responses.jsonl"
    source.write_text(json.dumps({"response": "Answer: 42.", "ground_truth": "42"}))
    result = grade(str(source), "--verifier", "robust + 0.5 * exact")
    verdict = json.loads(result.stdout)
    assert (verdict["accuracy"], verdict["reward"]) == (1, 0.5)
    assert verdict["rewards"] == {"robust": 1.0, "exact": -1.0}


def test_a_part_of_the_labelled_table_through_the_command(tmp_path):
    cases = load_cases()[::40]
    lines = (json.dumps({"response": c.response, "ground_truth": c.ground_truth, "prompt": c.prompt}) for c in cases)
    result = grade("-", "--workers", "2", "--timeout", "30", stdin="\n".join(lines).encode())
    verdicts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [bool(verdict["accuracy"]) for verdict in verdicts] == [case.robust for case in cases]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["{folder}"], "Is a directory"),
        (["{file}", "--verifier", "exat"], "did you mean 'exact'?"),
        (["{file}", "--workers", "0"], "workers = 0: Input should be greater than 0"),
        (["{file}", "--timeout", "-1"], "timeout"),
        (["{file}", "--workers", "two"], "invalid int value"),
        ([], "required"),
    ],
)
def test_what_cannot_run_says_why_and_exits_with_2(tmp_path, arguments, message):
    file = tmp_path / "in.jsonl"
    file.write_text('{"response": "Answer: 42", "ground_truth": "42"}\n')
    result = grade(*(argument.format(file=file, folder=tmp_path) for argument in arguments))
    assert result.returncode == 2
    assert message in result.stderr.decode()
    assert b"Traceback" not in result.stderr
    assert file.read_text().startswith('{"response"')


def test_code_of_ones_own_judges_where_the_command_names_it():
    line = b'{"response": "7", "ground_truth": "7", "verifier": "tests.reward.hostile:judge"}'
    result = grade("-", "--verifier", "tests.reward.hostile:judge", stdin=line)
    assert json.loads(result.stdout)["rule"] == "own"


def test_an_empty_file_has_no_verdicts(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    result = grade(str(tmp_path / "empty.jsonl"))
    assert result.returncode == 0
    assert result.stdout == b""
    assert b"0 lines" in result.stderr


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"response": "Answer: 42", "ground_truth": "42"}\n' * 30_000)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m reward grade {file} | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["accuracy"] == 1
    assert b"Traceback" not in result.stderr


def test_the_command_imports_nothing_heavy():
    code = "import sys, reward.__main__; print(*{m.split('.')[0] for m in sys.modules})"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment, timeout=60)
    heavy = {"torch", "ray", "numpy", "sympy", "math_verify", "sglang", "megatron", "transformers", "jsonschema"}
    assert not heavy & set(modules.stdout.decode().split())


def test_a_request_keeps_what_the_line_says():
    request = parse_line(b'{"response": "r", "ground_truth": 1.50, "prompt": "p", "verifier": "choice"}', "robust")
    assert (request.response, request.ground_truth, request.prompt, request.verifier) == ("r", "1.50", "p", "choice")
    assert parse_line(b'{"response": "r", "ground_truth": "x"}', "exact").verifier == "exact"
    with pytest.raises(ValueError, match="ground_truth"):
        parse_line(b'{"response": "r", "ground_truth": true}', "robust")
    with pytest.raises(VerifierError):
        parse_line(b'{"response": "r", "ground_truth": "x", "verifier": "nope"}', "robust")
