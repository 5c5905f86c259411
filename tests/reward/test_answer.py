"""The parts of `robust` by themselves: what is read as the statement, as a number, and what algebra may see."""

import time
from fractions import Fraction

import pytest

from reward.answer import symbolic
from reward.answer.compare import compare
from reward.answer.extract import last_statement
from reward.answer.number import read_number
from reward.answer.read import answer_key, read
from reward.answer.text import ascii_lower, clean
from reward.verdict import Deferred, Rule, VerificationRequest, VerifierError
from reward.verifiers import robust
from tests.reward.conftest import judge_robust


@pytest.mark.parametrize(
    ("response", "text", "rivals"),
    [
        ("Answer: 1\nAnswer: 2", "2", ()),
        ("Answer: 1 or Answer: 2", "2", ("1 or",)),
        ("Answer: 1\nAnswer: 2\nAnswer: 3", "3", ("2", "1")),
        ("Answer: 3\nAnswer: 3\nAnswer: 3", "3", ()),
        ("\\boxed{1}\n\nor\n\n\\boxed{2}", "2", ("1",)),
        ("\\boxed{1} was wrong, so \\boxed{2}", "2", ()),
        ("Answer:\n\n\n  $$\n x \n$$ done\nmore", "$$\n x \n$$ done", ()),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt{2}}", ()),
        ("Answer: 1\n\\boxed{2", "1", ()),
    ],
)
def test_the_last_statement_and_its_rivals(response, text, rivals):
    statement = last_statement(response)
    assert statement is not None
    assert (statement.text, statement.rivals) == (text, rivals)


def test_a_line_copied_from_the_prompt_is_no_statement():
    prompt = (
        'Say it as: Answer: 7 (an example of the form).\nRemember to put your answer on its own line after "Answer:".'
    )
    copied = prompt.splitlines()[0]
    assert last_statement(copied, prompt) is None
    assert last_statement(copied) is not None
    statement = last_statement(f"Answer: 8\n\n{copied}", prompt)
    assert statement is not None
    assert statement.text == "8"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234,567.50", Fraction(2469135, 2)),
        ("12 345", 12345),
        ("1 234 56", None),
        ("1,23", None),
        ("0.1\\overline{6}", Fraction(1, 6)),
        ("-2\\frac{1}{4}", Fraction(-9, 4)),
        ("3\\frac{1}{0}", None),
        ("1.5e-3", Fraction(3, 2000)),
        ("6.02 \\times 10^{23}", 602 * 10**21),
        ("50%", 50),
        ("42 cm", 42),
        ("42 or so", None),
        ("42\u00b0C", 42),
        ("9" * 1001, None),
        ("9" * 1000, int("9" * 1000)),
        ("1e999", 10**999),
        ("1e1000", None),
        ("", None),
        (".", None),
        ("-", None),
    ],
)
def test_numbers_are_exact(text, value):
    number = read_number(clean(text))
    assert (number.value if number else None) == value


@pytest.mark.parametrize("ending", [" or 43", "\n" + "chatter " * 2000])
def test_a_line_beyond_the_limit_is_no_answer_wherever_it_ends(ending):
    """Nothing behind the limit may be dropped as if it did not stand there."""
    line = "Answer: 42" + " " * 6000 + "or 43" + ending
    assert not judge_robust(line, "42").accuracy
    assert judge_robust("Answer: 42\n" + " " * 6000 + ending, "42").accuracy


def test_lower_case_keeps_every_place():
    for text in ("Answer: \u0130\u0130 ANSWER", "\ud83d A \ud83d\ude00 Z", "\u1e9e\u00df SS"):
        lower = ascii_lower(text)
        assert len(lower) == len(text)
        assert all(
            b == (a.lower() if a.isascii() else a) or (b == "?" and "\ud800" <= a <= "\udfff")
            for a, b in zip(text, lower, strict=True)
        )


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}", "9^9^9", "2^{10^{10}}", "2^{99999999}", "((2^{9999})^{9999})^{9999}", "501!", "(5!)!", "5!!",
        "\\binom{999999}{5}", "\\sum_{k=1}^{10} k", "\\int x", "\\lim x", "\\prod x", "\\def\\x{1}", "\\input{x}",
        "1+" * 200 + "1", "(" * 20 + "1" + ")" * 20, "((1)", "1))", "import os", "x", "42 43", "42+",
        "\\frac{1}{2", "9" * 61,        "2^{2^{2^2}}", "{{9^9}^9}^{9999}", "1\n;2", "\u00e9", "$1$",
    ],
)  # fmt: skip
def test_algebra_never_sees_an_attack(text):
    assert not symbolic.fits(symbolic.normalise(text), "42")


@pytest.mark.parametrize(
    "text",
    [
        "\\sqrt{1764}",
        "2^{10}",
        "e^{i\\pi}",
        "\\frac{\\frac{1}{2}}{3}",
        "5!",
        "\\binom{10}{3}",
        "\\sqrt[3]{8}",
        "|-42|",
        "2^{2^3}",
    ],
)
def test_algebra_sees_arithmetic(text):
    assert symbolic.fits(symbolic.normalise(text), "42")


def test_what_fits_is_decided_soon():
    """The largest expressions of each kind that the grammar lets through, within the default limit of a verdict."""
    for text in ("2^{9999}", "500!", "\\binom{2000}{1000}", "(9^{99})^{99}", "+".join(["\\sqrt{2}"] * 30), "3^{3^3}"):
        assert symbolic.fits(symbolic.normalise(text), "42"), text
        start = time.process_time()
        assert not symbolic.equivalent(text, "42")
        assert time.process_time() - start < 5.0, text


def test_algebra_is_deferred_and_nothing_else_is():
    def judge(text: str) -> object:
        return robust.judge(VerificationRequest(response=f"Answer: {text}", ground_truth="42"))

    assert isinstance(judge("\\sqrt{1764}"), Deferred)
    assert not any(isinstance(judge(text), Deferred) for text in ("42", "43", "1/2", "I know not", "x", "1, 2", "42.5"))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("42", Rule.INTEGER), ("42.5", Rule.NUMBER), ("41 or 42", Rule.HEDGE), ("N", Rule.PLACEHOLDER),
        ("no idea at all", Rule.UNREADABLE), ("6\\cdot 7", Rule.SYMBOLIC), ("9" * 6000, Rule.UNREADABLE),
    ],
)  # fmt: skip
def test_the_rule_says_why(text, rule):
    assert judge_robust(f"Answer: {text}", "42").rule is rule


def test_no_statement_is_a_rule_too():
    assert judge_robust("I would say 42.", "42").rule is Rule.NONE


def test_an_unusable_ground_truth_is_an_error_whatever_the_response():
    for truth in ("", " ", "$", "**", "1" * 4097):
        for response in ("", "Answer: 42"):
            with pytest.raises(VerifierError, match="ground truth"):
                judge_robust(response, truth)


@pytest.mark.parametrize(("one", "other"), [("0.5", "1/2"), ("\\frac{1}{2}", "0.50"), ("1,000", "1000"), ("A B", "AB")])
def test_answers_that_are_counted_as_one(one, other):
    assert answer_key(one) == answer_key(other)


@pytest.mark.parametrize(("one", "other"), [("41", "42"), ("x", "y"), ("", "0"), ("\\pi", "3.14"), ("1/3", "0.33")])
def test_answers_that_are_counted_apart(one, other):
    assert answer_key(one) != answer_key(other)


@pytest.mark.parametrize("text", ["", "\\" * 200, "{" * 200, "9" * 200, "\ud800", "\x00", "1e999"])
def test_any_text_has_a_key(text):
    hash(answer_key(text))


@pytest.mark.parametrize(
    ("answer", "truth"), [("λ", "\\lambda"), ("2λ + 1", "2\\lambda+1"), ("2\\cdot x/", "2*x/"), ("2·x/", "2\\times x/")]
)
def test_letters_and_signs_for_times_are_one_text(answer, truth):
    assert compare(read(clean(answer)), read(clean(truth))) == (True, Rule.TEXT)
