"""The tables of the answer rules, which stand beside this file: the words of words.toml, the rules of patterns.toml."""

import re
import tomllib
from pathlib import Path
from typing import Any


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text("utf-8"))


WORDS = _table("words")
_PATTERNS = _table("patterns")
_FRAGMENTS = _PATTERNS["fragments"] | {
    "hedges": "|".join(WORDS["no_units"]["hedges"].split()),
    "scales": "|".join(WORDS["scales"]),
}
_FRAGMENT = re.compile(r"\(\?&(\w+)\)")


def _compiled(pattern: str | list[str]) -> re.Pattern[str]:
    text = "".join(pattern)
    while _FRAGMENT.search(text):
        text = _FRAGMENT.sub(lambda fragment: f"(?:{_FRAGMENTS[fragment[1]]})", text)
    return re.compile(text)


def patterns(section: str) -> dict[str, re.Pattern[str]]:
    """The patterns of one section, by name."""
    return {name: _compiled(pattern) for name, pattern in _PATTERNS[section].items()}


class Rewriting:
    """Rules of one list, applied one after the other. Rewriting("factors")("3(1)") == "3\\\\cdot (1)"."""

    def __init__(self, section: str) -> None:
        self._rules = [
            (rule.get("needs", ""), _compiled(rule["find"]), rule["put"], rule.get("times", 1))
            for rule in _PATTERNS[section]
        ]

    def __call__(self, text: str) -> str:
        for needs, find, put, times in self._rules:
            for _ in range(times if needs in text else 0):
                text, count = find.subn(put, text)
                if not count:
                    break
        return text
