"""Verifier `json`: the last JSON value of the response, equal to a value, or valid under a schema, or both.

The ground truth is a JSON object with `equals`, `schema` (a JSON Schema), or both, as
{"equals": {"x": 1}, "schema": {...}}.
The response is read strictly: what is broken is no value, and nothing inside it is one.
Not fast: a schema may hold regular expressions, so each verdict has the wall-clock limit of the pool.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from reward.verdict import EXTRACTED_LIMIT, Judgement, Rule, VerificationRequest, VerifierError, said

RULE_EQUALS = "json-equals"
RULE_SCHEMA = "json-schema"


def judge(request: VerificationRequest) -> Judgement:
    """Right if the last JSON value that the response states satisfies the ground truth.

    Numbers are equal by value (1 and 1.0), a boolean is no number; the order of items counts, that of keys does not.

    Raises:
        VerifierError: the ground truth has another form, or its schema is none.
    """
    wanted = load(request.ground_truth)
    if not isinstance(wanted, dict) or not wanted or wanted.keys() - {"equals", "schema"}:
        form = 'a JSON object with "equals", "schema", or both, each key once, of numbers that a double can hold'
        raise VerifierError(f"verifier json: the ground truth must be {form}")
    schema = Schema(wanted["schema"]) if "schema" in wanted else None
    value, text = last(said(request.response))
    if value is ABSENT:
        return Judgement(accuracy=False, extracted=None, rule=Rule.NONE)
    valid = schema is None or schema.holds(value)
    equal = valid and ("equals" not in wanted or same(value, wanted["equals"]))
    rule = RULE_EQUALS if valid and "equals" in wanted else RULE_SCHEMA
    return Judgement(accuracy=equal, extracted=text[:EXTRACTED_LIMIT], rule=rule)


def same(given: Any, wanted: Any) -> bool:
    """Equality of JSON values, as JSON Schema defines it."""
    return jsonschema.Draft202012Validator({"const": wanted}).is_valid(given)


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_OF_EACH_TYPE: tuple[Any, ...] = (None, True, 0, "", [], {})
"""What is tried on each reference: a schema that applies itself to the very same value, as {"$ref": "#"}, is never done
with it."""


class Schema:
    """A schema, ready to be applied. Schema({"type": "integer"}).holds(3) is true."""

    def __init__(self, schema: Any) -> None:
        """Raises VerifierError: not a schema, one that leads back to itself, or one that refers to what it does not
        hold; nothing is fetched."""
        try:
            kind = jsonschema.validators.validator_for(schema)
            kind.check_schema(schema)
            self._validator = kind(schema, registry=Registry())
            root = Resource.from_contents(schema, default_specification=DRAFT202012)
            resolver, parts = Registry().with_resource("", root).resolver(), [schema]
            for part in parts:
                parts += part if isinstance(part, list) else part.values() if isinstance(part, dict) else ()
            objects = [part for part in parts if isinstance(part, dict)]
            for name in [each[key] for each in objects for key in _REFERENCES if isinstance(each.get(key), str)]:
                applied = self._validator.evolve(schema=resolver.lookup(name).contents)
                for value in _OF_EACH_TYPE:
                    applied.is_valid(value)
        except RecursionError:
            raise VerifierError("verifier json: the schema is nested too deep, or leads back to itself") from None
        except Unresolvable as error:
            why = f"refers to what it does not hold: {str(error)[:120]}"
            raise VerifierError(f"verifier json: the schema {why}") from error
        except (jsonschema.SchemaError, TypeError, AttributeError) as error:
            raise VerifierError(f"verifier json: the schema is not valid: {str(error)[:120]}") from error

    def holds(self, value: Any) -> bool:
        """Whether the value is valid; one that is nested too deep to be looked through is not."""
        try:
            return bool(self._validator.is_valid(value))
        except RecursionError:
            return False


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
_WORK = 20_000_000
"""Characters that are read of what is no value: half a second."""
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
        whole = load(part) if fenced else ABSENT
        found = (whole, part.strip()) if whole is not ABSENT else _last_of(part) or found
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
    at = work = opened = 0
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
            stopped, work = begin, work + 10_000
        work += stopped - begin + 1 + len(text) // 50  # the error counts its lines
        if work > _WORK:
            return ABSENT, ""
        if _COMMAND.search(text, max(0, begin - 40), begin):
            opened, at = opened + 1, begin + 1
            continue
        evident = _EVIDENT.match(text, begin) is not None
        paragraph = -1 if evident or text[begin] == "{" else text.find("\n\n", begin)
        end = len(text) if paragraph < 0 else paragraph
        closed = None if begin in unclosed else _closed(text, begin, end, unclosed)
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
    if not math.isfinite(number) or (number == 0 and _NONZERO.match(numeral)):
        raise ValueError(f"{numeral[:40]} is no JSON or beyond a double")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_double, parse_constant=_double)
