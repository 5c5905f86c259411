"""`robust` against exact arithmetic of the standard library, on generated numbers in generated dress."""

import time
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from reward.answer.number import read_number
from reward.answer.text import clean
from reward.verdict import Deferred, VerificationRequest, VerifierError
from reward.verifiers import exact, robust
from tests.reward.conftest import judge_robust

INTEGERS = st.integers(min_value=-(10**15), max_value=10**15)
SMALL = st.integers(min_value=-999, max_value=999)
DRESSES = r"""
    Answer: {} | **Answer:** {} | **Answer: {}** | Answer: ${}$ | Answer: \({}\) | Answer: \boxed{{{}}} | \boxed{{{}}}
    | Answer: {}. | Final Answer: **{}** | Answer: $x = {}$ | Answer: `{}` | Answer: {{{}}}
    | Answer: \text{{{}}} | ANSWER : {} | Answer: {} cm | Answer: \[{}\]<|im_end|> | Answer: $\displaystyle {}$,
    | The answer is below. ### Answer: {}
"""
DRESS = st.sampled_from([dress.strip() for dress in DRESSES.split(" | ") if "{}" in dress] + ["Answer:\n$$\n{}\n$$"])


def say(dress: str, text: str) -> str:
    return dress.format(text)


def integer_forms(value: int) -> st.SearchStrategy[str]:
    """Texts that mean `value`."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    grouped = f"{size:,}"
    arabic = str(size).translate({ord("0") + digit: chr(0x0660 + digit) for digit in range(10)})
    return st.sampled_from(
        [
            f"{value}",
            f"{sign}{grouped}",
            sign + grouped.replace(",", "{,}"),
            sign + grouped.replace(",", "\\,"),
            f"{sign}00{size}",
            f"{value}.0",
            f"{value}.",
            sign.replace("-", "\u2212") + str(size),
            sign + arabic,
            f"{sign or '+'}{size}",
            f"\\frac{{{2 * value}}}{{2}}",
            f"{3 * value}/3",
        ]
    )


@given(value=INTEGERS, dress=DRESS, data=st.data())
def test_every_form_of_an_integer_is_that_integer(value, dress, data):
    response = say(dress, data.draw(integer_forms(value)))
    assert judge_robust(response, str(value)).accuracy, response


@given(value=INTEGERS, other=INTEGERS, dress=DRESS, data=st.data())
def test_no_form_of_an_integer_is_another_integer(value, other, dress, data):
    response = say(dress, data.draw(integer_forms(value)))
    assert judge_robust(response, str(other)).accuracy == (value == other), response


@given(
    above=SMALL,
    below=st.integers(1, 999),
    scale=st.integers(1, 20),
    truth_above=SMALL,
    truth_below=st.integers(1, 999),
    form=st.sampled_from(["{}/{}", "\\frac{{{}}}{{{}}}", "\\dfrac{{{}}}{{{}}}", "{{{}}}/{{{}}}", "{} / {}"]),
    dress=DRESS,
    equal=st.booleans(),
)
def test_fractions_are_compared_by_value(above, below, scale, truth_above, truth_below, form, dress, equal):
    wanted = Fraction(above, below) if equal else Fraction(truth_above, truth_below)
    response = say(dress, form.format(above * scale, below * scale))
    truth = f"\\frac{{{wanted.numerator}}}{{{wanted.denominator}}}"
    assert judge_robust(response, truth).accuracy == (Fraction(above, below) == wanted), (response, truth)


@given(value=st.decimals(-10_000, 10_000, places=4), other=st.decimals(-10_000, 10_000, places=4), dress=DRESS)
def test_decimals_are_compared_by_value(value, other, dress):
    assert judge_robust(say(dress, f"{value:f}"), f"{value.normalize():f}").accuracy
    assert judge_robust(say(dress, f"{value:f}"), f"{other:f}").accuracy == (value == other)


@given(numeral=st.from_regex(r"[+-]?(?:\d{1,6}(?:\.\d{0,6})?|\.\d{1,6})(?:[eE][+-]?\d{1,2})?", fullmatch=True))
def test_numerals_have_the_value_that_decimal_gives_them(numeral):
    number = read_number(clean(numeral))
    assert number is not None
    assert number.value == Fraction(Decimal(numeral if numeral[-1] != "." else numeral + "0"))


@given(whole=st.integers(0, 99), above=st.integers(1, 99), below=st.integers(1, 99))
def test_mixed_numbers(whole, above, below):
    for text in (f"{whole}\\frac{{{above}}}{{{below}}}", f"{whole} {above}/{below}"):
        number = read_number(clean(text))
        assert number is not None
        assert number.value == whole + Fraction(above, below)


@example(values=[0, 1, -1], joint=" | ", dress="Answer: {}")
@given(
    values=st.lists(SMALL, min_size=2, max_size=6, unique=True),
    joint=st.sampled_from(
        [", ", " or ", " and ", "; ", " \\text{ or } ", ", or ", "$ or $", " versus ", " | ", " ", "/ or "]
    ),
    dress=DRESS,
)
def test_several_answers_earn_nothing(values, joint, dress):
    assume(joint != " " or min(values) >= 0)  # `0 -1` is a difference
    response = say(dress, joint.join(map(str, values)))
    for value in values:
        assert not judge_robust(response, str(value)).accuracy, (response, value)


@given(
    values=st.lists(SMALL, min_size=2, max_size=6, unique=True), joint=st.sampled_from([", ", " or ", " ", "\nor\n"])
)
def test_several_boxes_earn_nothing(values, joint):
    response = joint.join(f"$\\boxed{{{value}}}$" for value in values)
    for value in values:
        assert not judge_robust(response, str(value)).accuracy, (response, value)


@given(values=st.lists(SMALL, min_size=2, max_size=5, unique=True), order=st.randoms())
def test_a_list_that_was_asked_for_may_come_in_any_order(values, order):
    truth = ", ".join(map(str, values))
    shuffled = order.sample(values, len(values))
    assert judge_robust(f"Answer: {', '.join(map(str, shuffled))}", truth).accuracy
    assert not judge_robust(f"Answer: {', '.join(map(str, shuffled[1:]))}", truth).accuracy


def harmless(text: str) -> bool:
    """No statement, and nothing that hides what follows: a block, a thought or a comment that is never closed."""
    return not any(mark in text.lower() for mark in ("answer", "boxed", "fbox", "```", "~~~", "<"))


@given(before=st.text(max_size=300).filter(harmless), first=INTEGERS, last=INTEGERS)
def test_the_last_statement_counts_whatever_stands_before(before, first, last):
    response = f"{before}\nAnswer: {first}\n\nNo, that was a slip.\n\nAnswer: {last}"
    assert judge_robust(response, str(last)).accuracy
    assert judge_robust(response, str(first)).accuracy == (first == last)


ALPHABET = (
    "0123456789 \n.,:;=+-*/^_!?$%()[]{}\\|<>\"'`~#&abixeANSWERnswer\u2212\u00b2\u0664\ud83d\x00\u2028\u00bd\u03c0"
)
MARKUP = r"""
    Answer: \boxed{ } { \frac{ \text{ \sqrt{ ^{ \( \) $ $$ \begin{pmatrix} \end{ 42 or = \pm \left( ** ``` %
"""
PIECES = st.one_of(st.sampled_from(MARKUP.split()), st.text(ALPHABET, max_size=12), st.text(max_size=5))


@settings(max_examples=400)
@given(pieces=st.lists(PIECES, max_size=60), ground_truth=st.text(ALPHABET, min_size=1, max_size=12))
def test_no_text_makes_a_verifier_raise_or_linger(pieces, ground_truth):
    """Only an unusable ground truth may be refused, by a VerifierError; algebra is left to the pool here."""
    request = VerificationRequest(response="".join(pieces), ground_truth=ground_truth, prompt="Answer: $Answer")
    start = time.process_time()
    for verifier in (robust, exact):
        with suppress(VerifierError):
            verifier.judge(request)
    assert time.process_time() - start < 1.0


@settings(max_examples=400)
@given(pieces=st.lists(PIECES, max_size=40))
def test_no_junk_is_ever_the_answer(pieces):
    judged = robust.judge(VerificationRequest(response="".join(pieces), ground_truth="738254916037"))
    assert isinstance(judged, Deferred) or not judged.accuracy


EXPRESSIONS = st.recursive(
    st.integers(0, 30).map(lambda n: (str(n), Fraction(n))),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: (f"({p[0][0]}+{p[1][0]})", p[0][1] + p[1][1])),
        st.tuples(inner, inner).map(lambda p: (f"({p[0][0]}-{p[1][0]})", p[0][1] - p[1][1])),
        st.tuples(inner, inner).map(lambda p: (f"{p[0][0]} \\cdot {p[1][0]}", p[0][1] * p[1][1])),
        st.tuples(inner, st.integers(1, 9)).map(lambda p: (f"\\frac{{{p[0][0]}}}{{{p[1]}}}", p[0][1] / p[1])),
    ),
    max_leaves=4,
)


@settings(max_examples=60)
@given(expression=EXPRESSIONS, off=st.integers(-1, 1))
def test_arithmetic_has_the_value_that_exact_fractions_give_it(expression, off):
    text, value = expression
    truth = value + off
    assert judge_robust(f"Answer: ${text}$", str(truth)).accuracy == (off == 0), (text, truth)
