"""Verifier `json`: the last JSON value of the response, equal to a value, or valid under a schema, or both.

The ground truth is a JSON object with `equals`, `schema` (a JSON Schema), or both, as
{"equals": {"x": 1}, "schema": {...}}.
Not fast: a schema may hold regular expressions, so each verdict has the wall-clock limit of the pool.
"""

from collections.abc import Iterator
from typing import Any

import jsonschema
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from reward.verdict import EXTRACTED_LIMIT, Judgement, Rule, VerificationRequest, VerifierError
from reward.verifiers.json_text import ABSENT, last, load

RULE_EQUALS = "json-equals"
RULE_SCHEMA = "json-schema"


def judge(request: VerificationRequest) -> Judgement:
    """Right if the last JSON value that the response states satisfies the ground truth.

    Numbers are equal by value (1 and 1.0), a boolean is no number; the order of items counts, that of keys does not.

    Raises:
        VerifierError: the ground truth has another form, or its schema is none.
    """
    wanted = _wanted(request.ground_truth)
    try:
        schema = Schema(wanted["schema"]) if "schema" in wanted else None
        value, text = last(request.response)
        if value is ABSENT:
            return Judgement(accuracy=False, extracted=None, rule=Rule.NONE)
        extracted = text[:EXTRACTED_LIMIT]
        if schema is not None and not schema.holds(value):
            return Judgement(accuracy=False, extracted=extracted, rule=RULE_SCHEMA)
    except VerifierError as error:
        raise VerifierError(f"verifier json: {error}") from error
    if "equals" in wanted:
        return Judgement(accuracy=same(value, wanted["equals"]), extracted=extracted, rule=RULE_EQUALS)
    return Judgement(accuracy=True, extracted=extracted, rule=RULE_SCHEMA)


def _wanted(ground_truth: str) -> dict[str, Any]:
    wanted = load(ground_truth)
    if not isinstance(wanted, dict) or not wanted or wanted.keys() - {"equals", "schema"}:
        raise VerifierError(
            'verifier json: the ground truth must be a JSON object with "equals", "schema", or both, with each key '
            "once and numbers that a double can hold"
        )
    return wanted


def same(given: Any, wanted: Any) -> bool:
    """Equality of JSON values."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(same(value, wanted[key]) for key, value in given.items())
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(same, given, wanted))
    return given == wanted


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_SHALLOW = 20
"""Levels of a value that no schema needs Python's whole stack for."""


class Schema:
    """A schema, ready to be applied. Schema({"type": "integer"}).holds(3) is true."""

    def __init__(self, schema: Any) -> None:
        """Raises VerifierError: not a schema, or one that refers to what it does not hold. Nothing is fetched."""
        try:
            kind = jsonschema.validators.validator_for(schema)
            kind.check_schema(schema)
            root = Resource.from_contents(schema, default_specification=DRAFT202012)
            resolver = Registry().with_resource("", root).resolver()
            for reference in (each[key] for each in _objects(schema) for key in _REFERENCES if key in each):
                if isinstance(reference, str):
                    resolver.lookup(reference)
        except (jsonschema.SchemaError, TypeError, AttributeError) as error:
            raise VerifierError(f"the schema is not valid: {str(error)[:120]}") from error
        except Unresolvable as error:
            raise VerifierError(f"the schema refers to what it does not hold: {str(error)[:120]}") from error
        except RecursionError:
            raise VerifierError("the schema is nested too deep") from None
        self._validator = kind(schema, registry=Registry())

    def holds(self, value: Any) -> bool:
        """Whether the value is valid; one that is nested too deep to be looked through is not.

        Raises:
            VerifierError: the schema cannot be applied, whatever the value.
        """
        try:
            return bool(self._validator.is_valid(value))
        except RecursionError:
            if _depth(value) <= _SHALLOW:
                raise VerifierError("the schema leads back to itself and its checking never ends") from None
            return False


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object of the schema, itself included."""
    todo = [schema]
    while todo:
        at = todo.pop()
        if isinstance(at, dict):
            yield at
            todo.extend(at.values())
        elif isinstance(at, list):
            todo.extend(at)


def _depth(value: Any) -> int:
    """How deep lists and objects are nested."""
    levels, at = 0, [value]
    while at := [item for each in at if isinstance(each, dict | list) for item in _items(each)]:
        levels += 1
    return levels


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
