"""Exact numbers out of cleaned text: integers, decimals, fractions, mixed and scientific forms, percentages, units.

Everything is exact: 42.0 is 42, and 0.333333 is not 1/3.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

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
        if self.value == other.value and (self.percent == other.percent or abs(self.value) >= 1):
            return True
        return self.percent != other.percent and (
            self.value / 100 == other.value if self.percent else other.value / 100 == self.value
        )


def _units_agree(one: str, other: str) -> bool:
    """`square units` (read as "2") agree with every unit of an area, `degrees` with both scales of temperature."""
    if not one or not other or one == other:
        return True
    if one.isdigit() or other.isdigit():
        return one[-1] == other[-1]
    return "degree" in (one, other) and bool(_TEMPERATURES & {one, other})


_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d{1,3}(?:'\d{3})+|\d+)(?!\d)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[+-]?\s*{_DECIMAL}"
_GROUP = rf"(?:\{{\s*{_SIGNED}\s*\}}|\d)"
_QUOTIENT_SIDE = rf"(?:{_DECIMAL}|\(\s*{_SIGNED}\s*\)|\{{\s*{_SIGNED}\s*\}})"
_FORMS = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"(?:(?P<whole>\d+)\s*)?\\frac\s*(?P<above>{_GROUP})\s*(?P<below>{_GROUP})",
        rf"(?:(?P<whole>\d+)(?: +|\s*\+\s*))?(?P<above>{_QUOTIENT_SIDE})\s*/\s*(?P<below>{_QUOTIENT_SIDE})",
        r"(?P<whole>\d*)\.(?P<fixed>\d*)\s*\\(?:overline|bar|dot)\s*\{\s*(?P<cycle>\d+)\s*\}",
        rf"(?P<number>{_DECIMAL})(?:[eE](?P<e>[+-]?\d{{1,3}})(?!\d)"
        r"|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*(?P<power>[+-]?\d{1,3})\s*\}|(?P<digit>\d)(?!\d)))?",
    )
)
_SIGN_AND_MONEY = re.compile(r"(?P<money>[$€£¥₹])?\s*(?P<sign>[+-]?)\s*(?P<debt>[$€£¥₹])?\s*", re.ASCII)
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee"}
_CODES = {"USD": "$", "US$": "$", "EUR": "€", "GBP": "£", "RS": "₹", "INR": "₹"}
_CURRENCY_CODE = re.compile(r"^(USD|US\$|EUR|GBP|Rs|INR)(?![A-Za-z])\.?\s*(?=\d)", re.IGNORECASE)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})(?![A-Za-z])", re.IGNORECASE)
_TO_NINETEEN = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
"""
_NUMBER_WORDS = {word: value for value, word in enumerate(_TO_NINETEEN.split())}
_DIGIT_WORDS = tuple(_NUMBER_WORDS)[1:10]
for _ten, _tens in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2):
    _NUMBER_WORDS[_tens] = 10 * _ten
    _NUMBER_WORDS |= {f"{_tens}-{word}": 10 * _ten + unit for unit, word in enumerate(_DIGIT_WORDS, 1)}
_SPELLED_NUMBER = re.compile(r"(?P<word>[A-Za-z]{3,9}(?:-[A-Za-z]{3,5})?)(?P<noun>\s+[A-Za-z]+)?")


def read_number(text: str) -> Number | None:
    """The number that the whole cleaned text states, None if it states none. Example: read_number("-1,234.50 cm")."""
    if len(text) > NUMERAL_LIMIT:
        return None
    text = text.strip()
    while text[:1] in ("(", "[") and text[-1:] in (")", "]") and text[1:-1].count(text[0]) == 0:
        text = text[1:-1].strip()
    if text[:1].isalpha():
        text = _spelled_out(_CURRENCY_CODE.sub(lambda code: _CODES[code[1].upper()], text))
    start = _SIGN_AND_MONEY.match(text)
    assert start is not None, "every part of the pattern is optional"
    for form in _FORMS:
        found = form.match(text, start.end())
        if found is None:
            continue
        scale = _SCALE.match(text, found.end())
        suffix = _read_suffix(text[(scale or found).end() :])
        if suffix is None:
            continue
        result = _value(found.groupdict())
        if result is None:
            return None
        value, unreduced = result
        unit, percent = suffix
        currency = _CURRENCIES.get(start["money"] or start["debt"] or "", "")
        if currency and unit != currency:
            unit = f"{currency}/{unit}" if unit else currency
        value *= _SCALES[scale[1].lower()] if scale else 1
        return Number(-value if start["sign"] == "-" else value, unit, percent, unreduced)
    return None


def _spelled_out(text: str) -> str:
    """`three` as `3`, `Seven apples` as `7 apples`; any other text as it is."""
    found = _SPELLED_NUMBER.fullmatch(text)
    value = _NUMBER_WORDS.get(found["word"].lower()) if found else None
    return text if found is None or value is None else f"{value}{found['noun'] or ''}"


def _fraction(numeral: str) -> Fraction:
    """`(-1,234.5)`, `{ 12 }` or `.5` as a fraction."""
    numeral = re.sub(r"[\s,'(){}]", "", numeral)
    return Fraction(numeral + "0" if numeral.endswith(".") else numeral)


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


# Words behind a number that say what is counted, each line's first word standing for all of them. Unknown nouns are let
# through, hence the list of words that are none.
_UNIT_NAMES = """
    cm centimeter centimetre, mm millimeter millimetre, km kilometer kilometre, m meter metre, kg kilogram, g gm gram,
    s sec second, min minute, h hr hour, inch in inche, foot ft feet, yard yd, pound lb, l liter litre,
    ml milliliter millilitre, degree deg °, celsius centigrade, fahrenheit, radian rad, dollar usd, cent, mile/h mph,
    km/h kmh kph, euro, yen, rupee, mile, day, week, month, year
"""
_UNITS = {word: names.split()[0] for names in _UNIT_NAMES.split(",") for word in names.split()}
_UNITS |= dict.fromkeys(("sq", "square", "cubic", "cu", "per", "unit"), "")
# Words that hedge, deny, or make another number of the one beside them.
HEDGE_WORDS = """
    not no never or nor either neither if unless but maybe perhaps possibly probably approximately about around
    roughly almost nearly less more fewer greater least most between except instead wrong incorrect false unknown
    guess wait actually rather before after next previous plus minus times twice half double alternatively otherwise
    hundred thousand million billion dozen
"""
_FURTHER_WORDS = """
    and than to through until till is isn isnt was wasn are aren be been vs versus else however then also over
    divided multiplied by squared cubed factorial mod modulo choose power root sqrt frac base trillion halves third
    thirds quarter quarters triple score pi tau phi theta alpha beta gamma delta lambda sigma omega sin cos tan log
    exp inf infinity infinite answer hundreds thousands millions billions trillions dozens tens tenth tenths
    hundredth hundredths thousandth thousandths fourth fourths fifth fifths sixth sixths seventh sevenths eighth
    eighths ninth ninths remainder short off each think believe both with without negative
"""
_NOT_UNITS = {*HEDGE_WORDS.split(), *_FURTHER_WORDS.split(), *_NUMBER_WORDS}
_TEMPERATURES = frozenset({"celsius", "fahrenheit"})
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_WORD = re.compile(r"[A-Za-z]+|°")
_BASE_TEN = re.compile(r"\s*_\s*(?:10|\{\s*10\s*\}|\{\s*ten\s*\})\s*")
_SUFFIX = re.compile(r"\s*(?:(?P<percent>%|percent\b)|(?P<unit>° ?[CF]?|[A-Za-z][A-Za-z /.^{}23°()\\]*))?\s*", re.ASCII)


def _read_suffix(text: str) -> tuple[str, bool] | None:
    """(unit, percent) that the text behind a number states, None if it makes the number something else."""
    if not text or text.isspace() or _BASE_TEN.fullmatch(text):
        return "", False
    found = _SUFFIX.fullmatch(text)
    if found is None or "\\" in text or len(text) > 60:
        return None
    if found["percent"]:
        return "", True
    words = _WORD.findall(found["unit"])
    spaced = text[0].isspace() or text[0] == "°"
    if words[0] == "°" and words[1:] in (["C"], ["F"]):
        words = ["celsius" if words[1] == "C" else "fahrenheit"]
    names = []
    for word in words:
        name = _unit(word)
        noun = spaced and len(word) > 2 and any(vowel in word.lower() for vowel in "aeiouy")
        if word.lower() in _NOT_UNITS or (name is None and not noun) or (len(word) == 1 and not spaced):
            return None  # `42m` may be a product
        names.append(name or "")
    if len(words) > 4:
        return None
    exponent = "".join(re.findall(r"\^\s*\{?\s*([23])", found["unit"])) or _POWERS.get(words[0].lower(), "")
    unit = "/".join(name for name in names if name) + exponent
    return next((name for name in names if name in _TEMPERATURES), unit), False


def _unit(word: str) -> str | None:
    """The name of a unit, "" for what only goes with one (`square`, `per`), None for any other word."""
    return _UNITS.get(word.lower(), _UNITS.get(word.lower().removesuffix("s")))


_EXPRESSION_WITH_UNIT = re.compile(
    r"(?P<expression>.*?[^\s(+*/^=-])\s+(?:(?P<dimension>sq|square|cu|cubic)\.?\s+)?(?P<unit>[A-Za-z]{2,15})"
    r"(?:\s*\^\s*\{?\s*(?P<power>[23])\s*\}?)?"
)


def split_unit(text: str) -> tuple[str, str]:
    r"""(expression, unit): `3\sqrt{2} cm^2` is ("3\sqrt{2}", "cm2"). Only units of the list, and no single letters."""
    found = _EXPRESSION_WITH_UNIT.fullmatch(text) if len(text) <= NUMERAL_LIMIT else None
    if found is None:
        return text, ""
    unit = _unit(found["unit"])
    power = found["power"] or _POWERS.get(found["dimension"] or "", "")
    return (text, "") if unit is None else (found["expression"], unit and unit + power)
