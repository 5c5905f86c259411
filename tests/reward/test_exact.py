"""The reference rule: its normalisation step by step, and against the reference itself where that is installed."""

import random

import pytest

from reward.verdict import VerificationRequest, VerifierError
from reward.verifiers import exact


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("x = 42", "42"),
        ("1,234", "1234"),
        ("1,2", "12"),  # a list becomes a number: the reference's mistake, kept
        ("tuna fish", "tunfish"),  # articles are cut from the ends of words too
        ("\\frac12", "\\frac{1}{2}"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("text $42$ more", "42"),
        ("$3$ or $4$", "3"),
        ("\\text{ 42 cm}", "42"),
        ("\\boxed{42}", "42"),
        ("42^\\circ", "42"),
        ("\\mbox{m}^2", ""),
        ("42.$", "42"),
        ("\\$42", "42"),
        ("5 dollars", "5"),
        ("line\n$7$", "line\n7"),
    ],
)
def test_normalisation(text, normal):
    assert exact.normalise(text) == normal


@pytest.mark.parametrize(
    ("response", "extracted"),
    [
        ("Answer: 1\nAnswer: 2", "2"),
        ("answer\n:\n\n 42 \n43", "42"),
        ("Answer: 42" + "z" * 290, "42" + "z" * 290),
        ("Answer: 42\n" + "z" * 299, None),
        ("\\boxed{42}", None),
        ("", None),
    ],
)
def test_extraction(response, extracted):
    judged = exact.judge(VerificationRequest(response=response, ground_truth="42"))
    assert judged.extracted == (extracted if extracted is None else extracted[:200])
    assert judged.accuracy is (extracted == "42")


def test_a_ground_truth_beyond_reason_is_an_error():
    with pytest.raises(VerifierError, match="4097 characters"):
        exact.judge(VerificationRequest(response="Answer: 1", ground_truth="1" * 4097))


WORDS = r"""
    Answer answer : 42 - 1,234 $ \$ \frac12 \frac{1}{2} \sqrt2 \text{ } { \textbf{ \boxed{ = x . ways units \ldots
    ^\circ ^{\circ} \; ,\! {,} " \dots \text{and} mbox \text{m} \text{}^2 \overline{ square sue ٤ ² , frac sqrt Answer:
    [INVALID] \mathrm{th}
"""
PIECES = [*WORDS.split(), " ", "\n", "an ", "a ", "\\ ", "\t", "\\text{\ns}"]


def test_against_the_reference_on_random_texts():
    reference = pytest.importorskip("verl.utils.reward_score.math_dapo")
    choose = random.Random(7)
    right = 0
    for _ in range(20_000):
        response = "Answer: " + "".join(choose.choices(PIECES, k=choose.randint(1, 20)))
        truth = choose.choice(["42", "1234", "\\frac{1}{2}", "".join(choose.choices(PIECES, k=3))])
        wanted, text = reference.is_correct_minerva(response[-300:], truth)
        judged = exact.judge(VerificationRequest(response=response, ground_truth=truth))
        assert judged.accuracy == wanted, (response, truth)
        assert judged.extracted is None or judged.extracted == text[:200]
        right += wanted
    assert right > 1000
