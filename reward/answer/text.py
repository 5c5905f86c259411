"""Cleaning: the same answer in markdown, LaTeX and Unicode dress becomes one plain text. Linear time, no exceptions."""

import re
import unicodedata

# Minus, hyphens and the en dash. An em dash is punctuation, so `— 42` does not become -42.
_MINUS_SIGNS = "\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d"

_REPLACED = dict.fromkeys(_MINUS_SIGNS, "-") | {
    character: plain
    for plain, characters in {
        "/": "\u2044\u2215\u00f7", "\\times ": "\u00d7\u2715", "\\cdot ": "\u22c5\u00b7\u2219", "\\pm ": "\u00b1",
        '"': "\u201c\u201d\u201e\u00ab\u00bb", "'": "\u2018\u2019", ",": "\u3001\u066c", ".": "\u3002\u066b",
        "\\infty ": "\u221e", "\\approx ": "\u2248", "\\le ": "\u2264", "\\ge ": "\u2265", "\\ne ": "\u2260",
        "\\emptyset ": "\u2205", "\\cup ": "\u222a", "\\cap ": "\u2229", "\\in ": "\u2208", " or ": "\u2228",
        " ": "\u220e", "\\mathbb{N}": "\u2115", "\\mathbb{Z}": "\u2124", "\\mathbb{R}": "\u211d",
        # kept, whatever their category: a unit, and two marks that show the digits in another order
        "\u00b0": "\u00b0", "\u202d": "\u202d", "\u202e": "\u202e",
    }.items()
    for character in characters
}  # fmt: skip
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_SUBSCRIPT_RUN = re.compile("[\u2080-\u2089]+")
_CAPITALS = re.compile("[A-Z]+")
_ROOT_SIGN = re.compile(r"([√∛∜])\s*(\d+|[A-Za-z])?")
_ROOTS = {"√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"}
_GREEK_NAMES = "alpha beta gamma delta epsilon theta lambda mu nu pi rho sigma tau phi psi omega"
_GREEK = frozenset(_GREEK_NAMES.split())


def ascii_lower(text: str) -> str:
    """`text` with A-Z in lower case and every character in its place (str.lower may lengthen a text)."""
    if text.isascii():
        return text.lower()
    try:
        return text.encode().lower().decode()
    except UnicodeEncodeError:  # lone surrogates: one by one they would cost more than all the rest
        return _CAPITALS.sub(lambda found: found[0].lower(), text)


def _plain_character(character: str) -> str | None:
    """What stands for a non-ASCII character, None if it stays."""
    replaced = _REPLACED.get(character)
    if replaced is not None:
        return replaced
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if (letter := unicodedata.name(character, "").removeprefix("GREEK SMALL LETTER ").lower()) in _GREEK:
        return f"\\{letter} "
    if 0xFF01 <= ord(character) <= 0xFF5E:
        return chr(ord(character) - 0xFEE0)
    if category == "Cf" or 0xFE00 <= ord(character) <= 0xFE0F:  # invisible: joiners, marks of direction, variation
        return ""
    if category == "No" and (form := unicodedata.normalize("NFKC", character)).count("\u2044") == 1:
        return " " + form.replace("\u2044", "/")
    return " " if category in ("Zs", "So", "Cs", "Co", "Cc") else None


def plain_characters(text: str) -> str:
    """ASCII for whatever has an ASCII reading: digits of all scripts, minus signs, full-width forms, vulgar fractions.

    Superscripts become `^{...}`, never digits: `4²` is 16, not 42. Pictures, lone surrogates and exotic
    spaces become spaces.
    """
    if text.isascii():
        return text
    text = _SUPERSCRIPT_RUN.sub(lambda run: f"^{{{unicodedata.normalize('NFKC', run[0])}}}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: f"_{{{unicodedata.normalize('NFKC', run[0])}}}", text)
    text = _ROOT_SIGN.sub(lambda root: _ROOTS[root[1]] + (f"{{{root[2]}}}" if root[2] else ""), text)
    table = {ord(c): plain for c in set(text) if ord(c) > 127 and (plain := _plain_character(c)) is not None}
    return text.translate(table)


STRUCK = re.compile(
    r"(?<![\w~])~~(?=[^\s~])[^~\n]{1,300}(?<=[^\s~])~~(?![\w~])|<(del|s|strike)>[^<>\n]{0,300}</\1>|<!--.{0,2000}?-->",
    re.DOTALL,
)
"""A passage of one line that is struck out, or a comment of HTML."""
# `\$` before a number is money; `\\[2pt]` in a matrix is no display bracket.
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
_SPECIAL_TOKENS = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|</?s>|&nbsp;"
    r"|</?(?:b|i|em|strong|p|br|code|u|span|div|center|h[1-6]|td|tr|li|pre|font|answer|final|solution|output|response)"
    r"(?: [a-z-]{1,20}=\"[^\"<>\n]{0,80}\")? ?/?>"
)
_MATH_DELIMITERS = re.compile(r"\\\$(?!\s*[-+]?[\d.])|(?<!\\)\$|(?<!\\)\\[()\[\]]|```\w*")
_WRAPPERS = re.compile(
    r"\\(?:text(?:bf|it|rm|tt|normal)?|math(?:rm|bf|it|sf|tt)|boldsymbol|bm|[mhf]box|operatorname\*?|underline|"
    r"displaystyle|emph|boxed|framebox|ensuremath)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
)
_LAYOUT = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|hfill|!|bf|rm|it|(?:black)?square|qed|Box|checkmark|"
    r"math(?:bf|rm|it|sf|tt)|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])|\\(?:text)?color\{[^{}]*\}"
)
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degrees?(?![A-Za-z])")
_BOLD = re.compile(r"(?<![\w)\]}])\*\*|\*\*(?![\w(\[{\\])")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;: ]|enspace\b|thinspace\b)|~")
_WIDE_SPACES = re.compile(r"\\q?quad(?![A-Za-z])|\\(?:hspace|[hv]?phantom)\{[^{}]*\}")
_VARIANTS = re.compile(r"\\(?:[dtc](frac|binom)|([lg]e)qslant)(?![A-Za-z])")
_OVER = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*)\\over(?![A-Za-z])((?:[^{}]|\{[^{}]*\})*)\}")
_STRUCTURE_LIMIT = 600  # characters: the searches for `\\over` and for environments take quadratic time
_ONE_ROW = re.compile(
    r"\\begin\{(align(?:ed)?|equation|gather(?:ed)?|split)(\*?)\}((?:(?!\\\\).)*?)\\end\{\1\2\}", re.DOTALL
)
_ARRAY = re.compile(r"(?:\[|\()\s*\\begin\{array\}\{[clr ]*\}((?:(?!\\begin).)*?)\\end\{array\}\s*(?:\]|\))", re.DOTALL)
_BARS = re.compile(r"\\[lr]?vert(?![A-Za-z])")

_EDGES_LEFT = " \t\r\n\v\f*_`#~\"'=:,;"
_EDGES_RIGHT = " \t\r\n\v\f*_`#~\"',;:."


def clean(text: str) -> str:
    """The answer without its dress.

    Two spaces stand where a math delimiter was, so that `$3$ $4$` cannot pass for one number, while `12\\,345` can.
    Example: clean("**$\\\\dfrac{1}{2}\\\\text{ cm}$.**") == "\\\\frac{1}{2} cm"
    """
    text = plain_characters(text)
    if "~~" in text or "<" in text:
        text = STRUCK.sub("  ", text)
    text = _SPECIAL_TOKENS.sub(" ", _CONTROLS.sub(" ", text))
    if "\\" in text or "$" in text or "`" in text or "~" in text:
        text = _MATH_DELIMITERS.sub("  ", text).replace("\\$", "$")
        for _ in range(6):
            text, count = _WRAPPERS.subn(r" \1 ", text)
            if not count:
                break
        text = _BARS.sub("|", _DEGREES.sub("°", _LAYOUT.sub("", text)))
        text = _VARIANTS.sub(r"\\\1\2", text).replace("\\varnothing", "\\emptyset")
        if "\\over" in text and len(text) <= _STRUCTURE_LIMIT:
            text = _OVER.sub(r"\\frac{\1}{\2}", f"{{{text}}}")
        if "\\begin" in text and len(text) <= _STRUCTURE_LIMIT:
            text = _ONE_ROW.sub(lambda row: f" {row[3].replace('&', ' ')} ", text)
            text = _ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text)
        text = _WIDE_SPACES.sub("  ", _SPACES.sub(" ", text)).replace("\\%", "%")
    text = text.replace("{,}", ",")
    if "*" in text:
        text = _BOLD.sub("", text).replace("**", "^")
    return strip_edges(text)


def strip_edges(text: str) -> str:
    """Without quotes, markdown, trailing punctuation, line breaks written as `\\\\`, and braces around the whole."""
    for _ in range(6):
        before = len(text)
        text = text.lstrip(_EDGES_LEFT).rstrip(_EDGES_RIGHT)
        while text.endswith(("\\", "\\n")):
            text = text.removesuffix("n")[:-1].rstrip(_EDGES_RIGHT)
        if text.endswith("}") and text.count("}") > text.count("{"):
            text = text[:-1]  # of a wrapper that was opened before the answer
        if text.endswith("|") and text.count("|") == 1:
            text = text[:-1]  # the end of a table's row
        if text.startswith("{") and text.endswith("}") and enclosed(text):
            text = text[1:-1]
        if len(text) == before:
            break
    return text


_BRACKETS = re.compile(r"\\?[()\[\]{}]")


def enclosed(text: str) -> bool:
    """Whether the bracket that opens `text` closes at its very end, as in `(1+(2))` and unlike `(1)(2)`."""
    return closing(text, 0, len(text), _BRACKETS) == len(text)


def closing(text: str, begin: int, end: int, brackets: re.Pattern[str]) -> int:
    """The place behind the bracket that closes the one at `begin`, -1 if that is not before `end`."""
    depth = 0
    for bracket in brackets.finditer(text, begin, end):
        depth += 1 if bracket[0][-1] in "([{" else -1
        if depth <= 0:
            return bracket.end()
    return -1


_LOOSE_SPACES = re.compile(r"(?<!\d) | (?!\d)")
_TIMES = re.compile(r"\\(?:times|cdot)(?![A-Za-z])|\*")
_ALL_REALS = re.compile(r"\(-\\infty,\+?\\infty\)|\\mathbb\s*\{?R\}?|\\R|[Aa]llreal(?:s|numbers?)|[Rr]ealnumbers")
_SINGLE_BRACES = re.compile(r"([\^_])\{(\w)\}|(\\sqrt)\{(\d)\}")


def compact(text: str) -> str:
    """A cleaned text for comparison with others: no spaces but between digits, `x^{2}` as `x^2`, one sign for times."""
    text = _TIMES.sub("*", _LOOSE_SPACES.sub("", " ".join(text.split())))
    text = _SINGLE_BRACES.sub(r"\1\2\3\4", text)
    if _ALL_REALS.fullmatch(text):
        return "\\mathbb{R}"
    return text.casefold() if text.isalpha() and len(text) > 1 else text
