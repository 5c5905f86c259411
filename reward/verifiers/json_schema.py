"""A JSON Schema that fetches nothing and whose checking ends: what cannot be used is refused before any response."""

from collections.abc import Iterator
from typing import Any

from reward.verdict import VerifierError

_IN_PLACE = ("not", "if", "then", "else")
_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_SHALLOW = 20
"""Levels of a value that no schema needs Python's whole stack for."""


class Schema:
    """A schema, ready to be applied. Schema({"type": "integer"}).holds(3) is true."""

    def __init__(self, schema: Any) -> None:
        """Raises VerifierError: not a schema, one that refers outside itself, or one that leads back to itself."""
        import jsonschema  # only verifier `json` needs it
        import referencing
        import referencing.exceptions
        from referencing.jsonschema import DRAFT202012

        try:
            kind = jsonschema.validators.validator_for(schema)
            kind.check_schema(schema)
            _check_references(schema)
            root = referencing.Resource.from_contents(schema, default_specification=DRAFT202012)
            resolver = referencing.Registry().with_resource("", root).resolver()
            _check_ends(schema, lambda reference: resolver.lookup(reference).contents)
        except (jsonschema.SchemaError, TypeError, AttributeError) as error:
            raise VerifierError(f"the schema is not valid: {str(error)[:120]}") from error
        except referencing.exceptions.Unresolvable as error:
            raise VerifierError(f"the schema refers to what it does not hold: {str(error)[:120]}") from error
        except RecursionError:
            raise VerifierError("the schema is nested too deep") from None
        self._validator = kind(schema, registry=referencing.Registry())

    def holds(self, value: Any) -> bool:
        """Whether the value is valid; one that is nested too deep to be looked through is not.

        Raises:
            VerifierError: the schema cannot be applied, whatever the value.
        """
        import referencing.exceptions

        try:
            return bool(self._validator.is_valid(value))
        except referencing.exceptions.Unresolvable as error:
            raise VerifierError(f"the schema refers to what it does not hold: {str(error)[:120]}") from error
        except RecursionError:
            if _depth(value) <= _SHALLOW:
                raise VerifierError("the schema leads back to itself and its checking never ends") from None
            return False


def _check_references(schema: Any) -> None:
    for holder in _objects(schema):
        for key in _REFERENCES:
            reference = holder.get(key)
            if isinstance(reference, str) and not reference.startswith("#"):
                raise VerifierError(
                    f"the schema refers to {reference[:80]!r}, outside itself, and nothing is fetched; "
                    "put it below $defs"
                )


def _check_ends(schema: Any, lookup: Any) -> None:
    """A schema that applies itself to the very same value, as {"$ref": "#"}, is never done with it.

    Raises VerifierError; referencing's Unresolvable for a reference to what is not there.
    """
    done: set[int] = set()
    for start in _objects(schema):
        path: list[int] = []
        todo: list[tuple[Any, bool]] = [(start, False)]
        while todo:
            subschema, leaving = todo.pop()
            if leaving:
                done.add(path.pop())
            elif id(subschema) in path:
                raise VerifierError("the schema leads back to itself on the same value: its checking never ends")
            elif isinstance(subschema, dict) and id(subschema) not in done:
                path.append(id(subschema))
                todo.append((subschema, True))
                todo.extend((each, False) for each in _in_place(subschema, lookup))


def _in_place(schema: dict[str, Any], lookup: Any) -> Iterator[Any]:
    """The subschemas that are applied to the value itself, not to a part of it."""
    for key in _REFERENCES:
        if isinstance(schema.get(key), str):
            yield lookup(schema[key])
    yield from (schema[key] for key in _IN_PLACE if key in schema)
    for key in _IN_PLACE_LISTS:
        yield from schema.get(key, ())
    dependent = schema.get("dependentSchemas")
    yield from dependent.values() if isinstance(dependent, dict) else ()


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
