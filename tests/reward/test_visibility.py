"""What is not shown, or is taken back, is no statement: code blocks, comments, strokes, retractions."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.answer.extract import code_blocks, is_retracted, last_statement
from reward.verifiers.choice import labelled, option


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("```\n#\n```", True), ("```python\n#", True), ("  ~~~\n#\n~~~", True), ("```\nx\n```\n#", False),
        ("```x``` #", False), ("```\nx\n```output\n#\n```", True), ("```\n~~~\n#", True), ("#\n```\nx\n```", False),
    ],
)  # fmt: skip
def test_code_blocks_are_those_of_markdown(text, inside):
    at = text.index("#")
    assert any(start < at < end for start, end in code_blocks(text)) == inside


@pytest.mark.parametrize(
    "response",
    [
        "```\n{}\n```", "```\n{}", "<!-- {} -->", "<!--\n{}\n-->\ndone", "% {}", "nothing % {}", "~~{}~~",
        "<del>{}</del>",
    ],
)  # fmt: skip
@pytest.mark.parametrize("statement", ["\\boxed{42}", "Answer: 42"])
def test_what_is_not_shown_is_no_statement(response, statement):
    assert last_statement(response.format(statement)) is None
    shown = last_statement(f"{statement}\n\n{response.format(statement.replace('42', '7'))}")
    assert shown is not None
    assert shown.text.strip() == "42"


@pytest.mark.parametrize(
    "percent", ["50% of it:", "$50\\%$ of it:", "50 %", "$x$ % 5 =", "the share (in %) is", "n % 7 is"]
)
def test_a_percent_sign_opens_no_comment(percent):
    statement = last_statement(f"{percent} \\boxed{{42}}")
    assert statement is not None
    assert statement.text == "42"


@pytest.mark.parametrize(
    ("behind", "retracted"),
    [
        ("Wait, that's wrong.", True), ("Actually no, that is incorrect.", True), ("The above answer is wrong.", True),
        ("I made an error.", True), ("Scratch that.", True), ("My answer is not correct.", True),
        ("", False), ("This is right.", False), ("If n were odd, my answer is wrong.", False),
        ("Note that it is wrong to assume n = 1.", False), ("I have not made an error.", False),
        ("No, the answer is 2.", True), ("But the answer is 42.0, no doubt.", False), ("But the answer is 042", False),
        ("If it were so, no: the answer is 8.", False),
        ("No, the answer is 43.", True), ("Actually, it should be 43.", True), ("But the final answer is 42.", False),
        ("A common mistake is 41; that is wrong.", False), ("Is that wrong? No: 6 * 7 = 42.", False),
    ],
)  # fmt: skip
def test_retractions(behind, retracted):
    assert is_retracted(f"Answer: 42\n{behind}", len("Answer: 42"), "42") == retracted


@given(digits=st.integers(0, 10**9), fence=st.sampled_from(["```", "~~~", "```latex"]))
def test_a_block_around_a_statement_always_hides_it(digits, fence):
    text = f"So:\n{fence}\n\\boxed{{{digits}}}\n{fence[:3]}\n"
    assert last_statement(text) is None
    after = last_statement(f"{text}\nAnswer: {digits}")
    assert after is not None
    assert after.text == str(digits)


@pytest.mark.parametrize(
    ("text", "letter"),
    [("(B)", "B"), ("b.", "B"), ("B) 41", "B"), ("Option B", "B"), ("(A) or (B)", None), ("A) 40 B) 41", None)],
)
def test_options(text, letter):
    assert option(text) == letter


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("(C) 13", ("C", "13")), ("C. 13", ("C", "13")), ("C", None), ("(A) - 1", None), ("(A) 1 (B) 2", None),
        ("(K) 13", None), ("A.13", None),
    ],
)  # fmt: skip
def test_labels_of_options(text, read):
    assert labelled(text) == read


@pytest.mark.parametrize("piece", ["```\n", "~~a", "<!--", "% ", " wait no", "<del>", "if the answer: "])
def test_a_megabyte_of_any_of_it_takes_no_time(piece):
    start = time.process_time()
    last_statement(piece * (1_000_000 // len(piece)) + "\\boxed{42}" * 70)
    last_statement("\\boxed{42}" * 70 + piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 2.0
