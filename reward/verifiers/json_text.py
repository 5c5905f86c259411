"""The last JSON value that a text states, read strictly: what is broken is no value, and nothing inside it is one."""

import json
import re
from collections.abc import Iterator
from typing import Any

ABSENT = object()
"""In place of a value, where there is none."""

_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[^\n`{\[]*$", re.MULTILINE)
_START = re.compile(r"[{\[]")
_EVIDENT = re.compile(r"\{\s*\"|\[\s*[\[{\"]")
"""Begins like JSON and hardly like prose."""
_KEYED = re.compile(r"\{\s*'?\w+'?\s*:")
"""Begins like an object of another language."""
_COMMAND = re.compile(r"\\(?:[A-Za-z]+\s*)?$")
"""What stands before a bracket of LaTeX: `\\boxed{`, `\\[`."""
_BRACKETS = re.compile(r'"(?:[^"\\\n]|\\.)*"?|[{}\[\]]')
_STRAY = re.compile(r"\s*[}\]]")
_NONZERO = re.compile(r"[^eE]*[1-9]")
_FAILURES = 1000
_PAIRS = {"}": "{", "]": "["}


def load(text: str) -> Any:
    """The JSON value that the whole text is, or ABSENT.

    Beyond Python's reader it refuses what readers disagree on: a key given twice, NaN, Infinity, and numbers beyond a
    double (1e999).
    """
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return ABSENT


def last(text: str) -> tuple[Any, str]:
    """The last JSON value of the text, and how it is written; ABSENT and "" if it states none.

    A value is an object or array anywhere, or the whole of a fenced block, or the whole text. Whichever begins last
    counts. An object or array that is broken or cut off counts as a statement that is no value; what lies inside it is
    no statement of its own.
    """
    if (value := load(text)) is not ABSENT:
        return value, text.strip()
    found: tuple[Any, str] = (ABSENT, "")
    for part, fenced in _parts(text):
        if fenced and (value := load(part)) is not ABSENT:
            found = value, part.strip()
            continue
        stated = _last_of(part)
        if stated is not None:
            found = stated
    return found


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The text cut at its fences: (part, whether it is inside one). No JSON value reaches over a fence."""
    at, fenced = 0, False
    for fence in _FENCE.finditer(text):
        yield text[at : fence.start()], fenced
        at, fenced = fence.end(), not fenced
    yield text[at:], fenced


def _last_of(text: str) -> tuple[Any, str] | None:
    """The last statement of a part; None if there is none in it."""
    stated: tuple[Any, str] | None = None
    unclosed: set[int] = set()
    at = failures = opened = 0
    while (start := _START.search(text, at)) is not None:
        begin = start.start()
        try:
            value, at = _DECODER.raw_decode(text, begin)
            stray = opened == 0 and _STRAY.match(text, at) is not None  # closes what was never opened
            stated = (ABSENT, "") if stray else (value, text[begin:at])
            continue
        except json.JSONDecodeError as error:
            stopped = error.pos
        except (ValueError, RecursionError):
            stopped = begin
        failures += 1
        if failures > _FAILURES:
            return ABSENT, ""
        if _COMMAND.search(text, max(0, begin - 40), begin):
            opened, at = opened + 1, begin + 1
            continue
        evident = _EVIDENT.match(text, begin) is not None
        paragraph = -1 if evident or text[begin] == "{" else text.find("\n\n", begin)
        closed = (
            None if begin in unclosed else _closed(text, begin, len(text) if paragraph < 0 else paragraph, unclosed)
        )
        stated = (ABSENT, "") if evident else stated
        broken_to = len(text) if evident or _KEYED.match(text, begin) else max(stopped, begin + 1)
        at = broken_to if closed is None else closed
    return stated


def _closed(text: str, begin: int, end: int, unclosed: set[int]) -> int | None:
    """Where what opens at `begin` is closed, texts in quotes left aside; None if that is not before `end`, and then
    `unclosed` gets whatever else is open there."""
    open_: list[int] = []
    counts = {"{": 0, "[": 0}
    for found in _BRACKETS.finditer(text, begin, end):
        bracket = found[0]
        if bracket in counts:
            open_.append(found.start())
            counts[bracket] += 1
        elif bracket in _PAIRS and counts[_PAIRS[bracket]]:
            while (ended := text[open_.pop()]) != _PAIRS[bracket]:
                counts[ended] -= 1  # never closed itself, it ends with what holds it
            counts[ended] -= 1
            if not open_:
                return found.end()
    unclosed.update(open_)
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("an object has a key twice")
    return dict(pairs)


def _double(numeral: str) -> float:
    number = float(numeral)
    if number in (float("inf"), float("-inf")) or (number == 0 and _NONZERO.match(numeral)):
        raise ValueError(f"{numeral[:40]} is beyond a double")
    return number


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_double, parse_constant=_constant)
