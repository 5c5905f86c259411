"""Answers that are counted as one, and answers that are not."""

import pytest

from reward.answer.compare import answer_key


@pytest.mark.parametrize(("one", "other"), [("0.5", "1/2"), ("\\frac{1}{2}", "0.50"), ("1,000", "1000"), ("A B", "AB")])
def test_equal(one, other):
    assert answer_key(one) == answer_key(other)


@pytest.mark.parametrize(("one", "other"), [("41", "42"), ("x", "y"), ("", "0"), ("\\pi", "3.14"), ("1/3", "0.33")])
def test_different(one, other):
    assert answer_key(one) != answer_key(other)


@pytest.mark.parametrize("text", ["", "\\" * 200, "{" * 200, "9" * 200, "\ud800", "\x00", "1e999"])
def test_any_text_has_a_key(text):
    hash(answer_key(text))
