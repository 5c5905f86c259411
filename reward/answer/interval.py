"""Inequalities as intervals: `0 \\le x < 1` is `[0,1)`, `x > 3` is `(3,\\infty)`."""

import re

_BELOW = r"(?:<|\\lt(?![A-Za-z])|\\l(?:eq?|eqslant)(?![A-Za-z])|<=)"
_ABOVE = r"(?:>|\\gt(?![A-Za-z])|\\g(?:eq?|eqslant)(?![A-Za-z])|>=)"
_NAME = r"\s*(?:[A-Za-z]|\\[A-Za-z]{2,8})\s*"
_SIDE = r"(?P<{}>[^<>=,;]{{1,80}}?)"
_BETWEEN = re.compile(
    rf"{_SIDE.format('low')}\s*(?P<first>{_BELOW}=?){_NAME}(?P<second>{_BELOW}=?)\s*{_SIDE.format('high')}"
)
_HALF = re.compile(rf"{_NAME}(?P<sign>(?:{_BELOW}|{_ABOVE})=?)\s*{_SIDE.format('bound')}")
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
    if found := _BETWEEN.fullmatch(text):
        left = "[" if _closed(found["first"]) else "("
        right = "]" if _closed(found["second"]) else ")"
        return f"{left}{found['low'].strip()},{found['high'].strip()}{right}"
    if found := _HALF.fullmatch(text):
        bound, sign = found["bound"].strip(), found["sign"]
        if re.match(_BELOW, sign):
            return f"(-\\infty,{bound}{']' if _closed(sign) else ')'}"
        return f"{'[' if _closed(sign) else '('}{bound},\\infty)"
    return None


def _closed(sign: str) -> bool:
    return "e" in sign or "=" in sign
