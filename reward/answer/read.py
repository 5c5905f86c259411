"""From cleaned text to an answer with structure: a number, a list of answers, or a text that only looks like itself."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from reward.answer.number import Number, read_number
from reward.answer.text import Rewriting, clean, compact, enclosed, patterns, strip_edges

_PATTERNS = patterns("reading")
_without_remarks = Rewriting("remarks")
_PARSED_LIMIT = 600  # characters: longer answers are compared as texts only


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as read. `x = 4.0` reads as Answer(text="x = 4.0", name="x", body="4.0", number=4, ...)."""

    text: str
    """Cleaned, complete."""

    body: str
    """Without what stands before the last `=`."""

    name: str = ""
    """What stands before the only `=`, compact; empty if there is none."""

    number: Number | None = None
    items: tuple["Answer", ...] = ()
    """Two or more answers if this is a list."""

    brackets: str = ""
    """Opening and closing bracket of the list: `()`, `[)`, `{}`, or empty."""

    rounded: "Answer | None" = None
    """What stands behind `\\approx`, where this answer is the exact one in front of it."""

    contradicts: bool = False
    """Says two numbers are one: `3 = 4`."""


@lru_cache(maxsize=2048)
def read_raw(text: str, *, sentences: bool = False) -> Answer:
    """As `read`, of a text that is not cleaned. Cached: a group's responses share the ground truth, and often state the
    same answer in the same words."""
    return read(clean(text), sentences=sentences)


def read(text: str, *, sentences: bool = False) -> Answer:
    """The answer that the cleaned text states.

    With `sentences`, prose around one number is let through where it commits to that number: `The total is 42.`
    """
    if len(text) > _PARSED_LIMIT:
        return Answer(text=text, body=text)
    if sentences:
        text = _without_remarks(text).strip(" ") if " " in text else text
    if (number := read_number(text)) is not None:
        return Answer(text=text, body=text, number=number)
    if (approximation := _PATTERNS["approximation"].fullmatch(text)) and (rounded := read_number(approximation[2])):
        value = Answer(approximation[2], approximation[2], number=rounded)
        return _read_approximation(read(strip_edges(approximation[1])), value)
    if sentences and (committed := _read_sentence(text)) is not None:
        return Answer(text=text, body=committed, number=read_number(committed))
    equation = _read_equation(text)
    if equation.number is not None and all(len(_split(side)) == 1 for side in _PATTERNS["equals"].split(text)[:-1]):
        return equation  # before the split at commas: `x = 1,000`
    inner, brackets = _unwrap(text)
    items = _split(inner)
    if len(items) > 1:
        return _read_list(text, items, brackets)
    both = text.count("\\pm") == 1 and "\\pmod" not in text and (not equation.name or equation.name.isalpha())
    return _read_plus_minus(equation.body if equation.name else inner) if both else equation


def _read_approximation(exact: Answer, rounded: Answer) -> Answer:
    """`10/3 \\approx 3.33` is 10/3; `x \\approx 3.33` is 3.33."""
    if exact.body.isalpha():
        return replace(rounded, name=exact.body)
    if exact.number is None or rounded.number is None:
        return replace(exact, rounded=rounded)
    off = abs(exact.number.value - rounded.number.value) >= Fraction(1, 10 ** len(rounded.body.partition(".")[2]))
    return replace(exact, rounded=rounded, contradicts=exact.contradicts or off)


def _read_list(text: str, items: list[str], brackets: str) -> Answer:
    answers: list[Answer] = []
    for item in items:
        answer = read(strip_edges(item))
        answers += answer.items if answer.items and not answer.brackets else (answer,)
    return Answer(text=text, body=text, items=tuple(answers), brackets=brackets)


def _read_plus_minus(inner: str) -> Answer:
    """`\\pm 2` and `1 \\pm \\sqrt{2}` as two answers, also in `text`: algebra knows no sign for both."""
    before, after = (side.strip() for side in inner.split("\\pm"))
    if not before and after[:1] in ("+", "-"):
        after = f"({after})"
    items = tuple(read(strip_edges(f"{before}{sign}{after}")) for sign in (("+", "-") if before else ("", "-")))
    text = ", ".join(item.text for item in items)
    return Answer(text=text, body=text, items=items)


def _read_equation(text: str) -> Answer:
    """`name = ... = body`; without `=`, the text itself."""
    sides = [strip_edges(side) for side in _PATTERNS["equals"].split(text)]
    unnamed = len(sides) == 1 or not sides[-1] or text.startswith(("\\approx", "not ", "Not "))
    if unnamed or _PATTERNS["aside"].fullmatch(sides[0]):
        return Answer(text=text, body=text)
    if len(sides) == 2 and len(sides[1]) == 1 and sides[1].isalpha() and sides[1] not in "ei" and read_number(sides[0]):
        sides.reverse()  # `5 = x`
    last, exact = read(sides[-1]), "\\approx" not in text
    own = last.number
    given = [number for side in sides[:-1] if own and (number := read_number(side)) is not None]
    others = [one for one in given if own and not (one.equals(own) or (one.unit and own.unit and one.unit != own.unit))]
    name = compact(sides[0]) if len(sides) == 2 else ""
    names = _PATTERNS["tuple_of_names"].findall(name) if name.startswith("(") and name.endswith(")") else []
    if last.items and len(names) == len(last.items) and name.count(",") == len(names) - 1:
        items = tuple(replace(item, name=each) for item, each in zip(last.items, names, strict=True))
        last = replace(last, items=items)
    if len(sides) > 2 and last.number and all(len(side) == 1 and side.isalpha() for side in sides[:-1]):
        last = replace(last, items=tuple(replace(last, name=side) for side in sides[:-1]))  # `x = y = 2`
    return replace(last, text=text, body=sides[-1], name=name, rounded=None, contradicts=exact and bool(others))


def _split(text: str) -> list[str]:
    """The parts between commas, semicolons, "or" and "and" that stand outside brackets; empty parts are dropped."""
    parts: list[str] = []
    depth = at = 0
    for token in _PATTERNS["list_tokens"].finditer(text):
        sign = token[0][-1]
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[at : token.start()])
            at = token.end()
    parts.append(text[at:])
    parts[0] = _PATTERNS["list_heads"].sub("", parts[0])
    return [part for part in parts if part.strip()]


def _unwrap(text: str) -> tuple[str, str]:
    """The text between brackets that enclose the whole, and those brackets (`\\\\{` as `{`)."""
    opener = text[:2] if text.startswith("\\{") else text[:1]
    if opener not in ("(", "[", "\\{") or text[-1:] not in (")", "]", "}") or not enclosed(text):
        return text, ""
    closer = text[-2:] if text.endswith("\\}") else text[-1:]
    return text[len(opener) : len(text) - len(closer)], opener[-1] + closer[-1]


def _read_sentence(text: str) -> str | None:
    """The numeral of `The total is 42`, `There are 42 ways` or `42, because ...`; None if the words hedge or deny."""
    text = text.replace("\u2014", " - ")
    if len(text) > 300 or not text.isascii() or _PATTERNS["uncommitted"].search(text):
        return None
    if (only := _PATTERNS["only_number"].fullmatch(text)) and read_number(only["stated"]):
        return only["stated"]
    cut = _PATTERNS["sentence_end"].search(text)
    head, tail = (text[: cut.start()], text[cut.end() :]) if cut else (text, "")
    head = strip_edges(head)
    reason = strip_edges(tail.removesuffix(")"))
    number, again = read_number(head), read_number(reason) or _read_equation(reason).number
    if any(map(str.isdigit, tail)) if again is None else number is None or not number.equals(again):
        return None  # `3 (four)`
    if tail and number is not None:
        return head
    copulas = [copula.end() for copula in _PATTERNS["copula"].finditer(head)]
    if not copulas or len({stated[0] for at in copulas if (stated := _PATTERNS["numeral"].match(head, at))}) > 1:
        return None  # `x is 3, y is 4`
    committed = strip_edges(head[copulas[-1] :])
    return committed if read_number(committed) is not None else None


def answer_key(extracted: str) -> Hashable:
    """A key to count answers by: equal for equal numbers (`0.5`, `1/2`) and texts equal up to spacing and LaTeX layout.

    Finer than the verifiers: answers that only algebra would find equal have different keys.
    """
    answer = read(clean(extracted))
    return answer.number.value if answer.number is not None else compact(answer.text)
