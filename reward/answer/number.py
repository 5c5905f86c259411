"""Exact numbers out of cleaned text: integers, decimals, fractions, mixed and scientific forms, percentages, units.

Everything is exact: 42.0 is 42, and 0.333333 is not 1/3.
"""

from dataclasses import dataclass
from fractions import Fraction

from reward.answer.text import WORDS, patterns

NUMERAL_LIMIT = 1000
"""Characters: a longer text is no number here (and stays below Python's limit of 4300 digits for int)."""


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value with what was written behind it. `50%`: Number(Fraction(50), unit="", percent=True, ...)."""

    value: Fraction
    unit: str
    percent: bool
    unreduced: bool
    """Written as a fraction that is not in lowest terms: an unworked quotient when it stands in the question too."""

    def equals(self, other: "Number") -> bool:
        """Same value. A unit counts only where both have one; `50%` equals 50 as well as 0.5, but `0.5%` not 0.5."""
        if not _units_agree(self.unit, other.unit):
            return False
        if self.percent == other.percent:
            return self.value == other.value
        share, plain = (self, other) if self.percent else (other, self)
        written = share.value == plain.value and abs(plain.value) >= 1 and not plain.unit  # `15%` is not $15
        return share.value / 100 == plain.value or written


def _units_agree(one: str, other: str) -> bool:
    """`square units` (read as "2") agree with every unit of an area, `degrees` with both scales of temperature."""
    if not one or not other or one == other:
        return True
    if one.isdigit() or other.isdigit():
        return one[-1] == other[-1]
    return "degree" in (one, other) and bool(_TEMPERATURES & {one, other})


_PATTERNS = patterns("number")
_FORMS = tuple(_PATTERNS[form] for form in ("fraction", "quotient", "recurring", "decimal"))
_TO_NINETEEN = WORDS["numbers"]["to_nineteen"].split()
_NUMBER_WORDS = {word: value for value, word in enumerate(_TO_NINETEEN)}
for _ten, _tens in enumerate(WORDS["numbers"]["tens"].split(), 2):
    _NUMBER_WORDS |= {f"{_tens}-{word}": 10 * _ten + unit for unit, word in enumerate(_TO_NINETEEN[:10])}
    _NUMBER_WORDS[_tens] = _NUMBER_WORDS.pop(f"{_tens}-zero")


def read_number(text: str) -> Number | None:
    """The number that the whole cleaned text states, None if it states none. Example: read_number("-1,234.50 cm")."""
    if len(text) > NUMERAL_LIMIT:
        return None
    text, pair = text.strip(), "," in text.replace(",000", "")  # `(1,168)` is a point, `(1,000)` hardly
    while text[:1] in ("(", "[") and text[-1:] in (")", "]") and text[1:-1].count(text[0]) == 0 and not pair:
        text = text[1:-1].strip()
    if text[:1].isalpha():
        text = _spelled_out(_PATTERNS["currency_code"].sub(lambda code: WORDS["currency_codes"][code[1].upper()], text))
    start = _PATTERNS["sign_and_money"].match(text)
    assert start is not None, "every part of the pattern is optional"
    for form in _FORMS:
        found = form.match(text, start.end())
        summed = found is not None and {"+", "/"} <= set(found[0])
        if found is None or (summed and start["sign"] == "-"):  # `-2+1/2`, unlike `2+1/2`, is no mixed number
            continue
        scale = _PATTERNS["scale"].match(text, found.end())
        if (suffix := _read_suffix(text[(scale or found).end() :])) is None:
            continue
        if (result := _value(found.groupdict())) is None:
            return None
        (value, unreduced), (unit, percent) = result, suffix
        currency = WORDS["currencies"].get(start["money"] or start["debt"] or "", "")
        if currency and unit != currency:
            unit = f"{currency}/{unit}" if unit else currency
        value *= WORDS["scales"][scale[1].lower()] if scale else 1
        return Number(-value if start["sign"] == "-" else value, unit, percent, unreduced or summed)
    return None


def _spelled_out(text: str) -> str:
    """`three` as `3`, `Seven apples` as `7 apples`; any other text as it is."""
    found = _PATTERNS["spelled"].fullmatch(text)
    value = _NUMBER_WORDS.get(found["word"].lower()) if found else None
    return text if found is None or value is None else f"{value}{found['noun'] or ''}"


def _fraction(numeral: str) -> Fraction:
    """`(-1,234.5)`, `{ 12 }` or `.5` as a fraction."""
    return Fraction(_PATTERNS["around_digits"].sub("", numeral))


def _value(parts: dict[str, str]) -> tuple[Fraction, bool] | None:
    r"""(value, unreduced) of the groups of one of `_FORMS`; None for a division by 0. `0.1\overline{6}` is 1/6."""
    if "cycle" in parts:
        fixed, cycle, scale = parts["fixed"], parts["cycle"], 10 ** len(parts["fixed"])
        start = Fraction(int((parts["whole"] or "0") + fixed), scale)
        return start + Fraction(int(cycle), scale * (10 ** len(cycle) - 1)), False
    if "number" in parts:
        exponent = parts["e"] or parts["power"] or parts["digit"] or "0"
        return _fraction(parts["number"]) * Fraction(10) ** int(exponent), False
    above, below, whole = _fraction(parts["above"]), _fraction(parts["below"]), parts["whole"]
    if below == 0:
        return None
    ratio = above / below
    return ratio + int(whole or 0), not whole and abs(ratio.numerator) != abs(above)


_UNITS = {word: name for name, words in WORDS["units"].items() for word in words.split()}
_SYMBOLS = {word: name for name, words in WORDS["unit_symbols"].items() for word in words.split()}
_NOT_UNITS = {*WORDS["no_units"]["hedges"].split(), *WORDS["no_units"]["others"].split(), *_NUMBER_WORDS}
_TEMPERATURES = frozenset({"celsius", "fahrenheit"})


def _read_suffix(text: str) -> tuple[str, bool] | None:
    """(unit, percent) that the text behind a number states, None if it makes the number something else."""
    if not text or text.isspace() or _PATTERNS["base_ten"].fullmatch(text):
        return "", False
    text = _PATTERNS["unit_product"].sub(" ", text)
    found = _PATTERNS["suffix"].fullmatch(text)
    if found is None or "\\" in text or len(text) > 60:
        return None
    if found["percent"]:
        return "", True
    words = _PATTERNS["words"].findall(found["unit"])
    gap = len(text) - len(text.lstrip(" °"))  # two spaces stand before `\\text{N}`
    if words[0] == "°" and words[1:] in (["C"], ["F"]):
        words = ["celsius" if words[1] == "C" else "fahrenheit"]
    names = []
    for word in words:
        name = unit_name(word)
        noun = gap > 0 and len(word) > 2 and any(vowel in word.lower() for vowel in "aeiouy")
        needed = 2 if word in _SYMBOLS and "^" in text else word in _SYMBOLS or len(word) == 1  # `42m` may be a product
        if word.lower() in _NOT_UNITS or (name is None and not noun) or gap < needed:
            return None
        names.append(name or "")
    if len(words) > 4:
        return None
    exponent = "".join(_PATTERNS["exponents"].findall(found["unit"])) or WORDS["powers"].get(words[0].lower(), "")
    unit = "/".join(name for name in names if name) + exponent
    return next((name for name in names if name in _TEMPERATURES), unit), False


def unit_name(word: str) -> str | None:
    """The name of a unit, "" for what only goes with one (`square`, `per`), None for any other word."""
    return _SYMBOLS.get(word, _UNITS.get(word.lower(), _UNITS.get(word.lower().removesuffix("s"))))


def split_unit(text: str) -> tuple[str, str]:
    r"""(expression, unit): `3\sqrt{2} cm^2` is ("3\sqrt{2}", "cm2"). Only units of the list, and no single letters."""
    found = _PATTERNS["expression_with_unit"].fullmatch(text) if len(text) <= NUMERAL_LIMIT else None
    if found is None:
        return text, ""
    unit = unit_name(found["unit"])
    power = found["power"] or WORDS["powers"].get(found["dimension"] or "", "")
    return (text, "") if unit is None else (found["expression"], unit and unit + power)
