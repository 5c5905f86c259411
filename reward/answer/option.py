"""Options of a multiple choice: `(B)`, `B. 42`, `Option B`."""

from reward.answer.rule_tables import patterns

OPTION = patterns("option")


def option(text: str) -> str | None:
    """The one option that the cleaned text names, in upper case; None if it names none, or several."""
    found = OPTION["letter"].fullmatch(text)
    if found is None:
        return None
    bracketed = found[1] or found[2]
    rest = found["rest"]
    if OPTION["another"].search(rest) or OPTION["listed"].fullmatch(rest) or OPTION["denied"].match(rest):
        return None
    if rest.strip() and not bracketed and not OPTION["text_of_option"].match(rest):
        return None
    return (bracketed or found[3]).upper()


def labelled(text: str) -> tuple[str, str] | None:
    """The letter and the text of one option, as `(C) 13` and `C. 13` state them; None for anything else."""
    label = OPTION["label"].match(text)
    if label is None or option(text) is None:
        return None
    rest = text[label.end() :]
    return None if rest[0] in "-+*/^=<>|" else (label[1] or label[2], rest)
