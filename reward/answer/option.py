"""Options of a multiple choice: `(B)`, `B. 42`, `Option B`."""

import re

_LETTER = re.compile(
    r"(?:(?:the )?(?:correct )?(?:final )?(?:answer|option|choice)(?: is)?\s*:?\s*)*"
    r"(?:\(\s*([a-z])\s*\)|\[\s*([a-z])\s*\]|([a-z])(?![a-z]))(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_TEXT_OF_OPTION = re.compile(r"\s*[.):,\u2014-]")
_ANOTHER = re.compile(r"\b(?:or|and|nor|not|either)\b\s*\(?[a-z]?\b|[,/&]\s*\(?[a-z]\)?(?![a-z])", re.IGNORECASE)
# Further options behind the first, as in `A. B. C.`, `(A) to (D)`, `A) 3 B) 4`; `B) P(A)` holds none.
_LISTED = re.compile(
    r"[\W_]*[A-H](?:[\W_]+[A-H])*[\W_]*|(?:.*[^\w)])?[(\[]\s*[A-H]\s*[)\]].*|[^(]*\s[A-H]\).*|[\W_]*\([A-H]\).*",
    re.DOTALL,
)
_DENIED = re.compile(
    r"\)?\s*(?:isn't|cannot|can't|(?:wrong|incorrect)|(?:is|was)\s+(?:wrong|incorrect|false))\b", re.IGNORECASE
)
_LABEL = re.compile(r"(?:\(([A-J])\)|([A-J])[.):])\s+(?=\S)")


def option(text: str) -> str | None:
    """The one option that the cleaned text names, in upper case; None if it names none, or several."""
    found = _LETTER.fullmatch(text)
    if found is None:
        return None
    bracketed = found[1] or found[2]
    rest = found["rest"]
    if _ANOTHER.search(rest) or _LISTED.fullmatch(rest) or _DENIED.match(rest):
        return None
    if rest.strip() and not bracketed and not _TEXT_OF_OPTION.match(rest):
        return None
    return (bracketed or found[3]).upper()


def labelled(text: str) -> tuple[str, str] | None:
    """The letter and the text of one option, as `(C) 13` and `C. 13` state them; None for anything else."""
    label = _LABEL.match(text)
    if label is None or option(text) is None:
        return None
    rest = text[label.end() :]
    return None if rest[0] in "-+*/^=<>|" else (label[1] or label[2], rest)
