"""Inequalities as intervals: `0 \\le x < 1` is `[0,1)`, `x > 3` is `(3,\\infty)`."""

import re

_RELATION = re.compile(r"((?:<|>|\\(?:lt|gt|[lg]eq?)(?![A-Za-z]))=?)")
_NAME = re.compile(r"[A-Za-z]|\\[A-Za-z]{2,8}")
_BOUND = re.compile(r"[^<>=,;]{1,80}")
_SEVERAL = re.compile(r"\b(?:or|and|if|not)\b|\\(?:lor|land|vee|wedge|cup|cap|ne|neq)(?![A-Za-z])")
_LIMIT = 200
"""Characters: a longer text is no plain inequality."""


def is_interval(items: int, brackets: str, text: str) -> bool:
    """Whether a list of so many items is an interval: half open, closed, or without end."""
    return items == 2 and ("[" in brackets or "]" in brackets or (brackets == "()" and "\\infty" in text))


def as_interval(text: str) -> str | None:
    """The interval that a cleaned inequality in one variable describes; None if `text` is none."""
    if len(text) > _LIMIT or _SEVERAL.search(text):
        return None
    parts = [part.strip() for part in _RELATION.split(text)]
    downwards = {sign[0] == ">" or sign[:2] == "\\g" for sign in parts[1::2]}
    if len(downwards) != 1 or len(parts) > 5:
        return None
    if downwards.pop():
        parts.reverse()
    if len(parts) == 3:
        parts = ["-\\infty", "<", *parts] if _NAME.fullmatch(parts[0]) else [*parts, "<", "\\infty"]
    low, first, name, second, high = parts
    if not (_NAME.fullmatch(name) and _BOUND.fullmatch(low) and _BOUND.fullmatch(high)):
        return None
    return f"{'[' if _closed(first) else '('}{low},{high}{']' if _closed(second) else ')'}"


def _closed(sign: str) -> bool:
    return "e" in sign or "=" in sign
