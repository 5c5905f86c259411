"""Verifier `choice`: multiple choice. The ground truth is one letter; so is the last statement of the response:
`(B)`, `B. 42`, `Option B`."""

from reward.answer.extract import last_statement
from reward.answer.text import clean, patterns
from reward.verdict import EXTRACTED_LIMIT, Judgement, Rule, VerificationRequest, VerifierError

OPTION = patterns("option")


def option(text: str) -> str | None:
    """The one option that the cleaned text names, in upper case; None if it names none, or several."""
    found = OPTION["letter"].fullmatch(text)
    if found is None or OPTION["letters"].fullmatch(text):
        return None
    bracketed, rest = found[1] or found[2], found["rest"]
    labels = bracketed or OPTION["text_of_label"].match(rest)
    if OPTION["another_label" if labels else "another"].search(rest) or OPTION["listed"].fullmatch(rest):
        return None
    if OPTION["denied"].match(rest) and not (labels and OPTION["text_of_denial"].match(rest)):
        return None
    letter = (bracketed or found[3]).upper()
    if any(other != letter for other in OPTION["more"].findall(rest)):
        return None
    if rest.strip() and not bracketed and not OPTION["text_of_option"].match(rest):
        return None
    return letter


def labelled(text: str) -> tuple[str, str] | None:
    """The letter and the text of one option, as `(C) 13` and `C. 13` state them; None for anything else."""
    parts = _parts(text)
    return None if parts is None or option(text) is None or parts[1][0] in "-+*/^=<>|" else parts


def _parts(text: str) -> tuple[str, str] | None:
    label = OPTION["label"].match(text)
    return label and (label[1] or label[2], text[label.end() :])


def _copied(text: str, prompt: str) -> str | None:
    """The letter of the option of the prompt that the text repeats, whatever its words: `B) Neither A nor C`."""
    stated, *offered = (_parts(line.strip(" -*.")) for line in (text, *map(clean, prompt.splitlines())))
    return stated[0] if stated and stated in offered else None


RULE = "choice"
"""The rule's name in `Verdict.rule` where a letter was stated."""


def judge(request: VerificationRequest) -> Judgement:
    """Right if the response states the letter of the ground truth and no other. `(B)`, `b.`, `B) Paris` state B.

    Raises:
        VerifierError: the ground truth is not a letter, with or without brackets.
    """
    wanted = option(clean(request.ground_truth[:EXTRACTED_LIMIT]))
    if wanted is None:
        raise VerifierError(f"ground truth {request.ground_truth[:40]!r} is not the letter of an option, such as 'B'")
    statement = last_statement(request.response, request.prompt)
    if statement is None:
        return Judgement(accuracy=False, extracted=None, rule=Rule.NONE)
    texts = [clean(text[:EXTRACTED_LIMIT]) for text in (statement.text, *statement.rivals)]
    stated = {_copied(text, request.prompt) or option(text) for text in texts}
    extracted = clean(statement.text)[:EXTRACTED_LIMIT]
    letter = stated.pop()
    if letter is None or stated:
        return Judgement(accuracy=False, extracted=extracted, rule=Rule.HEDGE if stated else Rule.UNREADABLE)
    return Judgement(accuracy=letter == wanted, extracted=letter, rule=RULE)
