"""Verifier `json`: the last JSON value of the response, equal to a value, or valid under a schema, or both.

The ground truth is a JSON object with `equals`, `schema` (a JSON Schema), or both, as
{"equals": {"x": 1}, "schema": {...}}.
Not cheap: a schema may hold regular expressions, so each verdict has the wall-clock limit of the pool.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from reward.messages import EXTRACTED_LIMIT, Judgement, Rule, VerificationRequest, VerifierError

RULE_EQUALS = "json-equals"
RULE_SCHEMA = "json-schema"

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_START = re.compile(r"[{\[]")
_ATTEMPTS = 1000
_ABSENT = object()


def judge(request: VerificationRequest) -> Judgement:
    """Right if the response's last JSON object, array, or fenced block satisfies the ground truth.

    Numbers are equal by value (1 and 1.0), a boolean is no number; the order of items counts, that of keys does not.

    Raises:
        VerifierError: the ground truth has another form, or its schema is none.
    """
    wanted = _wanted(request.ground_truth)
    validator = _validator(wanted["schema"]) if "schema" in wanted else None
    value, text = last_json(request.response)
    if value is _ABSENT:
        return Judgement(accuracy=False, extracted=None, rule=Rule.NONE)
    extracted = text[:EXTRACTED_LIMIT]
    if validator is not None and not _valid(value, validator):
        return Judgement(accuracy=False, extracted=extracted, rule=RULE_SCHEMA)
    if "equals" in wanted:
        return Judgement(accuracy=same(value, wanted["equals"]), extracted=extracted, rule=RULE_EQUALS)
    return Judgement(accuracy=True, extracted=extracted, rule=RULE_SCHEMA)


def _wanted(ground_truth: str) -> dict[str, Any]:
    wanted = _loads(ground_truth)
    if not isinstance(wanted, dict) or not wanted or wanted.keys() - {"equals", "schema"}:
        raise VerifierError('verifier json: the ground truth must be a JSON object with "equals", "schema", or both')
    return wanted


def _validator(schema: Any) -> Any:
    """A validator of the schema that fetches nothing: a reference must stay within the schema."""
    import jsonschema  # only this verifier needs it
    import referencing

    try:
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
    except (jsonschema.SchemaError, TypeError, AttributeError) as error:
        raise VerifierError(
            f"verifier json: the schema of the ground truth is not valid: {str(error)[:120]}"
        ) from error
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise VerifierError(
                f"verifier json: the schema refers to {reference[:80]!r}, outside itself, and nothing is fetched; "
                "put it below $defs"
            )
    return kind(schema, registry=referencing.Registry())


def _references(schema: Any) -> Iterator[str]:
    """Every `$ref` and `$dynamicRef` of the schema."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


def _valid(value: Any, validator: Any) -> bool:
    import referencing.exceptions

    try:
        return validator.is_valid(value)
    except referencing.exceptions.Unresolvable as error:
        raise VerifierError(f"verifier json: the schema refers to what it does not hold: {str(error)[:120]}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("an object names a key twice: which value it means is anybody's guess")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _loads(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return _ABSENT


def last_json(response: str) -> tuple[Any, str]:
    """The last JSON value and its text: that of a fenced block if one holds JSON, else an object or array."""
    for block in reversed(_FENCE.findall(response)):
        if (value := _loads(block)) is not _ABSENT:
            return value, block.strip()
    if (value := _loads(response)) is not _ABSENT:
        return value, response.strip()
    found: tuple[Any, str] = (_ABSENT, "")
    at = 0
    for _ in range(_ATTEMPTS):
        start = _START.search(response, at)
        if start is None:
            break
        try:
            value, at = _DECODER.raw_decode(response, start.start())
            found = value, response[start.start() : at]
        except (ValueError, RecursionError):
            at = start.end()
    return found


def same(given: Any, wanted: Any) -> bool:
    """Equality of JSON values."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(same(value, wanted[key]) for key, value in given.items())
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(same, given, wanted))
    return given == wanted
