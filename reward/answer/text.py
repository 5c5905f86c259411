"""Cleaning: the same answer in markdown, LaTeX and Unicode dress becomes one plain text. Linear time, no exceptions.

And the tables of the answer rules, which stand beside this file: the words of words.toml, the rules of patterns.toml.
"""

import re
import tomllib
import unicodedata
from pathlib import Path
from typing import Any


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text("utf-8"))


WORDS = _table("words")
_RULES = _table("patterns")
_HEDGES = "|".join(WORDS["no_units"]["hedges"].split())
_FRAGMENTS = _RULES["fragments"] | {"hedges": _HEDGES, "scales": "|".join(WORDS["scales"])}
_FRAGMENT = re.compile(r"\(\?&(\w+)\)")


def _compiled(pattern: str | list[str]) -> re.Pattern[str]:
    text = "".join(pattern)
    while _FRAGMENT.search(text):
        text = _FRAGMENT.sub(lambda fragment: f"(?:{_FRAGMENTS[fragment[1]]})", text)
    return re.compile(text)


def patterns(section: str) -> dict[str, re.Pattern[str]]:
    """The patterns of one section, by name."""
    return {name: _compiled(pattern) for name, pattern in _RULES[section].items()}


class Rewriting:
    """Rules of one list, applied one after the other. Rewriting("factors")("3(1)") == "3\\\\cdot (1)"."""

    def __init__(self, section: str) -> None:
        self._rules = [(r.get("needs", ""), _compiled(r["find"]), r["put"], r.get("times", 1)) for r in _RULES[section]]

    def __call__(self, text: str) -> str:
        for needs, find, put, times in self._rules:
            for _ in range(times if needs in text else 0):
                text = find.sub(put, text)
        return text


_CHARACTERS = {character: plain for plain, characters in WORDS["characters"].items() for character in characters}
_SCRIPTS = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+)|[\u2080-\u2089]+")
_ROOT_SIGN = re.compile(r"([√∛∜])\s*(\d+|[A-Za-z])?")


def ascii_lower(text: str) -> str:
    """`text` with A-Z in lower case and every character in its place (str.lower may lengthen a text).

    Lone surrogates become question marks.
    """
    return text.lower() if text.isascii() else text.encode(errors="replace").lower().decode()


def _plain_character(character: str) -> str | None:
    """What stands for a non-ASCII character, None if it stays."""
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
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
    text = _SCRIPTS.sub(lambda run: f"{'^' if run[1] else '_'}{{{unicodedata.normalize('NFKC', run[0])}}}", text)
    text = _ROOT_SIGN.sub(lambda root: WORDS["roots"][root[1]] + (f"{{{root[2]}}}" if root[2] else ""), text)
    table = {ord(c): plain for c in set(text) if ord(c) > 127 and (plain := _plain_character(c)) is not None}
    return text.translate(table)


_without_marks, _latex, _spaces, _markdown, _layout = map(Rewriting, ("marks", "latex", "spaces", "markdown", "layout"))
upwards = Rewriting("upwards")
_PATTERNS = patterns("structure")
_STRUCTURE_LIMIT = 600  # characters: the searches for `\\over` and for environments take quadratic time
_LATEX_SIGNS = frozenset("\\$`~")

_EDGES_LEFT = " \t\r\n\v\f*_`#~\"'=:,;"
_EDGES_RIGHT = " \t\r\n\v\f*_`#~\"',;:."


def clean(text: str) -> str:
    """The answer without its dress.

    Two spaces stand where a math delimiter was, so that `$3$ $4$` cannot pass for one number, while `12\\,345` can.
    Example: clean("**$\\\\dfrac{1}{2}\\\\text{ cm}$.**") == "\\\\frac{1}{2} cm"
    """
    text = _without_marks(plain_characters(text))
    if not _LATEX_SIGNS.isdisjoint(text):
        text = _latex(text)
        if "\\over" in text and len(text) <= _STRUCTURE_LIMIT:
            text = _PATTERNS["over"].sub(r"\\frac{\1}{\2}", f"{{{text}}}")
        if "\\begin" in text and len(text) <= _STRUCTURE_LIMIT:
            text = _PATTERNS["one_row"].sub(lambda row: f" {row[3].replace('&', ' ')} ", text)
            text = _PATTERNS["array"].sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text)
        text = _spaces(text)
    return strip_edges(_markdown(text))


def strip_edges(text: str) -> str:
    """Without quotes, markdown, trailing punctuation, line breaks written as `\\\\`, and braces around the whole."""
    for _ in range(6):
        text = text.lstrip(_EDGES_LEFT).rstrip(_EDGES_RIGHT)
        while text.endswith(("\\", "\\n")):
            text = text.removesuffix("n")[:-1].rstrip(_EDGES_RIGHT)
        if text.endswith("}") and text.count("}") > text.count("{"):
            text = text[:-1]  # of a wrapper that was opened before the answer
        if text.startswith("{") and text.endswith("}") and enclosed(text):
            text = text[1:-1]
    return text


def enclosed(text: str) -> bool:
    """Whether the bracket that opens `text` closes at its very end, as in `(1+(2))` and unlike `(1)(2)`."""
    return closing(text, 0, len(text), _PATTERNS["brackets"]) == len(text)


def closing(text: str, begin: int, end: int, brackets: re.Pattern[str]) -> int:
    """The place behind the bracket that closes the one at `begin`, -1 if that is not before `end`."""
    depth = 0
    for bracket in brackets.finditer(text, begin, end):
        depth += 1 if bracket[0][-1] in "([{" else -1
        if depth <= 0:
            return bracket.end()
    return -1


def compact(text: str) -> str:
    """A cleaned text for comparison with others: no spaces but between digits, `x^{2}` as `x^2`, one sign for times."""
    text = _layout(upwards(" ".join(text.split())))
    return text.casefold() if text.isalpha() and len(text) > 1 else text
