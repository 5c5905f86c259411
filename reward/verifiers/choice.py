"""Verifier `choice`: multiple choice. The ground truth is one letter; so is the last statement of the response."""

import re

from reward.answer.extract import last_statement
from reward.answer.text import clean, plain_characters
from reward.messages import EXTRACTED_LIMIT, Judgement, Rule, VerificationRequest, VerifierError

RULE = "choice"
"""The rule's name in `Verdict.rule` where a letter was stated."""

_LETTER = re.compile(
    r"(?:(?:the )?(?:correct )?(?:final )?(?:answer|option|choice)(?: is)?\s*:?\s*)*"
    r"(?:\(\s*([a-z])\s*\)|\[\s*([a-z])\s*\]|([a-z])(?![a-z]))(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_TEXT_OF_OPTION = re.compile(r"\s*[.):,\u2014-]")
_ANOTHER = re.compile(r"\b(?:or|and|nor|not|either)\b\s*\(?[a-z]?\b|[,/&]\s*\(?[a-z]\)?(?![a-z])", re.IGNORECASE)
_LISTED = re.compile(
    r"[\W_]*[A-H](?:[\W_]+[A-H])*[\W_]*|(?:.*[^\w)])?[(\[]\s*[A-H]\s*[)\]].*|[^(]*\s[A-H]\).*|[\W_]*\([A-H]\).*",
    re.DOTALL,
)
"""Further options behind the first, as in `A. B. C.`, `(A) to (D)`, `A) 3 B) 4`; `B) P(A)` holds none."""
_DENIED = re.compile(r"\)?\s*(?:isn't|cannot|can't|(?:is|was)\s+(?:wrong|incorrect|false))\b", re.IGNORECASE)


def judge(request: VerificationRequest) -> Judgement:
    """Right if the response states the letter of the ground truth and no other. `(B)`, `b.`, `B) Paris` state B.

    Raises:
        VerifierError: the ground truth is not a letter, with or without brackets.
    """
    wanted = _letter(request.ground_truth)
    if wanted is None:
        raise VerifierError(f"ground truth {request.ground_truth[:40]!r} is not the letter of an option, such as 'B'")
    statement = last_statement(request.response, request.prompt)
    if statement is None:
        return Judgement(accuracy=False, extracted=None, rule=Rule.NONE)
    stated = {_letter(text) for text in (statement.text, *statement.rivals)}
    extracted = clean(statement.text)[:EXTRACTED_LIMIT]
    if len(stated) > 1:
        return Judgement(accuracy=False, extracted=extracted, rule=Rule.HEDGE)
    letter = stated.pop()
    if letter is None:
        return Judgement(accuracy=False, extracted=extracted, rule=Rule.UNREADABLE)
    return Judgement(accuracy=letter == wanted, extracted=letter, rule=RULE)


def _letter(text: str) -> str | None:
    """The one option that the text names, in upper case."""
    found = _LETTER.fullmatch(clean(plain_characters(text[:EXTRACTED_LIMIT])))
    if found is None:
        return None
    bracketed = found[1] or found[2]
    rest = found["rest"]
    if _ANOTHER.search(rest) or _LISTED.fullmatch(rest) or _DENIED.match(rest):
        return None
    if rest.strip() and not bracketed and not _TEXT_OF_OPTION.match(rest):
        return None
    return (bracketed or found[3]).upper()
