"""Verifier `json`: the last JSON value of the response, equal to a value, or valid under a schema, or both.

The ground truth is a JSON object with `equals`, `schema` (a JSON Schema), or both, as
{"equals": {"x": 1}, "schema": {...}}.
Not fast: a schema may hold regular expressions, so each verdict has the wall-clock limit of the pool.
"""

from typing import Any

from reward.verdict import EXTRACTED_LIMIT, Judgement, Rule, VerificationRequest, VerifierError
from reward.verifiers.json_schema import Schema
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
