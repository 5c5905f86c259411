r"""Algebra: whether two LaTeX expressions are equal, by the math-verify library.

math-verify runs sympy, which may take for ever or all memory on the wrong input, so two fences stand before it: a
grammar (`fits`) that lets only short, closed expressions through, and the pool, which kills the process that runs
`equivalent` past its limit. The library is imported at the first use, never with this module.
"""

import logging
import math
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

from reward.answer.text import WORDS, Rewriting, closing, patterns

if TYPE_CHECKING:
    from sympy import Expr, Rel

LENGTH_LIMIT = 300  # characters of an expression
_DEPTH_LIMIT = 12  # nested brackets
# Largest product of the numerals in an exponent; in all exponents together where powers are raised to powers.
_EXPONENT_LIMIT = 10_000
# Decimal places to which two numbers are compared; where a difference could be smaller, only algebra decides.
_DIGITS_LIMIT = 6000
_BINOMIAL_LIMIT = 3000  # largest numeral beside a binomial coefficient; years are asked for

_PATTERNS = patterns("algebra")
_ARITHMETIC = frozenset(WORDS["macros"]["arithmetic"].split())
_ALGEBRA = _ARITHMETIC | frozenset(WORDS["macros"]["algebra"].split())
_names_as_macros, _explicit_factors = Rewriting("names"), Rewriting("factors")


def normalise(text: str, beside: str = "") -> str:
    r"""Plain `sqrt(2)` and `pi` as LaTeX, decimals as fractions, on one line; for a cleaned text. Degrees in radians
    in a trigonometric function, or where the other text, `beside`, has `\pi`."""
    text = _names_as_macros(" ".join(text.split()))
    if "°" in text:
        turned = _PATTERNS["trigonometric"].search(text) or "\\pi" in beside
        text = _PATTERNS["degrees"].sub(r"(\1\\cdot\\frac{\\pi}{180})" if turned else r"\1", text)
    # `0.5` as `(\frac{05}{10})`: the library would round decimals.
    text = _explicit_factors(text)
    return _PATTERNS["decimals"].sub(lambda each: f"(\\frac{{{each[1]}{each[2]}}}{{1{'0' * len(each[2])}}})", text)


def fits(text: str, truth: str) -> bool:
    """Whether a normalised answer may be handed to sympy at all, given the normalised ground truth.

    Not if it is prose (letters that the truth does not have), an unknown command (sums, integrals, limits), names whose
    letters are no factors (`AB` is a point, a matrix or a word before it is a product), or a size that can only be an
    attack or nonsense: towers of powers, huge exponents and factorials, deep nesting.
    """
    if not text or len(text) > LENGTH_LIMIT or _PATTERNS["forbidden"].search(text) or not _balanced(text):
        return False
    letters = set("".join(_PATTERNS["letters"].findall(_PATTERNS["environments"].sub("", truth))))
    allowed = _ALGEBRA if letters or _PATTERNS["commands"].search(truth) else _ARITHMETIC
    commands = _PATTERNS["commands"].findall(text)
    if allowed is _ARITHMETIC and _PATTERNS["not_arithmetic"].search(text):
        return False
    if any(name not in allowed if name else sign not in "{}\\" for name, sign in commands):
        return False
    if set("".join(_PATTERNS["letters"].findall(_PATTERNS["environments"].sub("", text)))) - letters - {"e", "i"}:
        return False
    names = [set(_PATTERNS["names"].findall(each.replace(" ", ""))) for each in (text, truth)]
    return names[0] == names[1] and not _is_word(truth) and _small(text)


def without_capitals(text: str, truth: str) -> str:
    """`text` with letters of its own for `r` where the truth has `R` too, as the library reads both as one letter."""
    letters = set("".join(_PATTERNS["letters"].findall(truth)))
    spare = iter(sorted(set("abcfghjklmnpqrstuvwxyz") - {letter.lower() for letter in letters}))
    # `d` begins a differential; `E` and `I` are constants.
    doubled = sorted(x for x in letters if x in "dEI" or (x.islower() and x.upper() in letters))
    table = str.maketrans({letter: next(spare, letter) for letter in doubled})
    return _PATTERNS["letters"].sub(lambda found: found[0].translate(table), text) if table else text


def letters(text: str) -> str:
    """All that may be variables."""
    return "".join(_PATTERNS["letters"].findall(text))


def _is_word(text: str) -> bool:
    """Whether letters that stand together are spelled, not multiplied."""
    text = text.strip("()").replace(" ", "").replace(",", "")
    return text.isalpha() and (len(text) > 3 or "o" in text or (len(text) > 1 and not text.islower()))


def _balanced(text: str) -> bool:
    depths = [0, *accumulate((character in "([{") - (character in ")]}") for character in text)]
    return min(depths) == depths[-1] == 0 and max(depths) <= _DEPTH_LIMIT


def _exponents(text: str) -> list[str]:
    """The text of every exponent, those inside exponents included; a plain `^9^9` gives one that begins with `^`."""
    exponents = []
    for caret in _PATTERNS["caret"].finditer(text):
        begin = caret.end()
        if not text.startswith("{", begin):
            bare = _PATTERNS["bare_exponent"].match(text, begin)
            exponents.append(bare[0] if bare else "^^")
        elif (after := closing(text, begin, len(text), _PATTERNS["braces"])) >= 0:
            exponents.append(text[begin + 1 : after - 1])
            exponents += ["^^"] if _PATTERNS["another_caret"].match(text, after) else []
    return exponents


def _small(text: str) -> bool:
    """Whether no part of the expression grows beyond what a machine can hold."""
    exponents = _exponents(text)
    if len(exponents) > 16 or text.count("!") > 4 or text.count("\\exp") > 1:
        return False
    for exponent in exponents:
        tower = "^" in exponent and any(int(each) > 3 for each in _PATTERNS["numerals"].findall(exponent))
        if tower or exponent.count("^") > 1 or _PATTERNS["grows"].search(exponent):
            return False
    if "!" in _PATTERNS["small_factorial"].sub("", text):
        return False
    power = _largest_power(text, exponents)
    if "\\binom" not in text:
        return power <= _EXPONENT_LIMIT
    largest = max(map(int, _PATTERNS["numerals"].findall(text)), default=0)
    return largest <= _BINOMIAL_LIMIT and power <= 60 and not _PATTERNS["grown_binomial"].search(text)


def _largest_power(text: str, exponents: list[str]) -> int:
    """The largest product of the numerals in an exponent; in all of them where powers are raised to powers."""
    products = [math.prod(max(int(n), 1) for n in _PATTERNS["numerals"].findall(each)) for each in exponents]
    return math.prod(products) if _PATTERNS["power_of_group"].search(text) else max(products, default=1)


def _decimal_places(text: str) -> int:
    """Decimal places that show apart two different numbers written with so many digits and such exponents."""
    if "\\exp" in text or any("e" in _PATTERNS["letters"].findall(exponent) for exponent in _exponents(text)):
        return _DIGITS_LIMIT + 1
    return 100 + 2 * sum(character.isdigit() for character in text) * _largest_power(text, _exponents(text))


@cache
def prepare() -> None:
    """Imports the library (about a second of CPU), so that the limit of a verdict does not pay for it."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    equivalent("x+1", "1+x")  # the first comparison builds the parser's tables


def equivalent(answer: str, truth: str) -> bool:
    """Whether two normalised expressions are equal, exactly. May never end: call it where it can be killed."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, grader, parse, verify
    from sympy import Basic, Expr, I, Symbol, evaluate

    # The library's own holds all relations for equal that have no solutions, and may need a minute for the others.
    grader.sympy_solve_and_compare = _same_relation

    # Its `units` takes the `h` of `r^2 h` for hours; a word of four letters is no product.
    units = _PATTERNS["word"].search(truth) is not None
    kept = NormalizationConfig(malformed_operators=True, nits=True, units=units)
    reads = [LatexExtractionConfig(normalization_config=kept)]

    def parsed(text: str) -> list:
        # no time limit of the library's: it works by signals, swallows errors, and the pool has the last word anyway
        return parse(f"${text}$", reads, fallback_mode="no_fallback", parsing_timeout=None)

    gold, target = parsed(truth), parsed(answer)
    if not gold or not target:
        return False
    places = max(_decimal_places(answer), _decimal_places(truth))
    for each in (gold, target):
        if isinstance(each[0], Basic):  # the library takes a letter for real in some layouts alone
            real = {letter: Symbol(letter.name, real=True) for letter in each[0].free_symbols}
            with evaluate(isinstance(each[0], Expr)):  # else `x^2 = -1` of a real letter would be `False`
                each[0] = each[0].xreplace(real)
            each[0] = each[0].xreplace({Symbol("i", real=True): I} if isinstance(each[0], Expr) else {})
    numbers = [each[0] for each in (gold, target) if isinstance(each[0], Expr)]
    if len(numbers) == 2 and not any(number.free_symbols for number in numbers):
        return _equal_numbers(numbers[0], numbers[1], places)
    if places > _DIGITS_LIMIT:
        return bool(gold[0] == target[0])
    equal = verify(gold, target, numeric_precision=places, timeout_seconds=None)
    return equal or (len(numbers) == 2 and _equal_where_positive(*numbers))


def _same_relation(one: "Rel", other: "Rel", *digits: int) -> bool:
    """Whether two relations that differ side by side say the same: of one left side the right ones are equal, or one
    is a multiple of the other."""
    from math_verify.grader import sympy_expr_eq
    from sympy import cancel, numer, together

    kinds = {each.rel_op.replace("<", ">") for each in (one, other)}
    if one.lhs == other.lhs and kinds == {"=="}:
        return bool(sympy_expr_eq(one.rhs, other.rhs, *digits))
    if len(kinds) > 1 or not (one.free_symbols and one.free_symbols == other.free_symbols):
        return False
    above = kinds < {">", ">="}
    sides = [together(each.gts - each.lts) if above else numer(together(each.lhs - each.rhs)) for each in (one, other)]
    ratio = cancel(sides[0] / sides[1])
    return bool(ratio.is_number and (ratio.is_positive if above else ratio.is_nonzero))


def _equal_numbers(one: "Expr", other: "Expr", places: int) -> bool:
    """Whether two closed expressions are one number.

    `places` decimals decide, which is far below what the expressions could differ by; where no number of decimals that
    can be had is enough, the difference has to vanish by algebra.
    """
    from sympy import I, nan, simplify

    one, other = one.doit(), other.doit()
    if nan in (one, other):  # `0/0` is no number
        return False
    if one.is_finite is False or other.is_finite is False:
        return bool(one == other)
    if not (one.has(I) or other.has(I)):
        one, other = _with_real_roots(one), _with_real_roots(other)
    difference = one - other
    if difference.is_Rational:
        return bool(difference == 0)
    if places > _DIGITS_LIMIT:
        return bool(simplify(difference) == 0)
    value = difference.evalf(places)
    return bool(value.is_number and abs(value) < 10 ** (20 - places))


def _equal_where_positive(one: "Expr", other: "Expr") -> bool:
    """Whether two expressions with roots of letters are equal for positive ones: `x^{2/3}`, `\\sqrt[3]{x^2}`."""
    from sympy import Pow, Symbol, simplify

    if not all(any(not root.exp.is_Integer and root.base.free_symbols for root in x.atoms(Pow)) for x in (one, other)):
        return False
    positive = {letter: Symbol(letter.name, positive=True) for letter in one.free_symbols | other.free_symbols}
    return bool(simplify(one.xreplace(positive) - other.xreplace(positive)) == 0)


def _with_real_roots(number: "Expr") -> "Expr":
    """The cube root of -8 is -2 here, not the complex root that sympy takes."""

    def is_odd_root(part: "Expr") -> bool:
        root = part.is_Pow and part.exp.is_Rational and part.exp.q % 2 and part.exp.q > 1
        return bool(root and part.base.is_negative)

    return number.replace(is_odd_root, lambda part: (-1) ** part.exp.p * (-part.base) ** part.exp)
