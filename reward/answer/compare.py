"""Whether two answers that were read are the same, decided without algebra; None where algebra has to decide."""

from dataclasses import replace

from reward.answer.read import Answer, read
from reward.answer.text import Rewriting, compact, patterns, upwards
from reward.verdict import Rule

_PATTERNS = patterns("comparison")
_listed = Rewriting("listed")
_INEQUALITY_LIMIT = 200  # characters: a longer text is no plain inequality


def compare(answer: Answer, truth: Answer) -> tuple[bool, Rule] | None:
    """(equal, rule), or None if neither numbers nor texts settle it.

    Numbers are equal only if exactly equal. A list where one answer was asked for is a hedge, unless all of its items
    are that answer. Order counts in `(a, b)` and `[a, b]`, not in `{a, b}` and `a, b`.
    """
    if answer.contradicts:
        return False, Rule.HEDGE
    if answer.rounded is not None and "." in truth.body and (compare(answer.rounded, truth) or (False,))[0]:
        return True, Rule.NUMBER
    if answer.number is not None and truth.number is not None:
        if is_equation(truth) and answer.name != truth.name:
            return None if answer.name else (False, Rule.EQUATION)
        integers = answer.number.value.denominator == truth.number.value.denominator == 1
        equal = (answer.number.equals(truth.number) and _names_agree(answer, truth)) or _same_text(answer, truth)
        return equal, Rule.INTEGER if integers else Rule.NUMBER
    if _same_text(answer, truth):
        return True, Rule.TEXT
    if _PATTERNS["both"].fullmatch(answer.text) and _PATTERNS["either"].fullmatch(truth.text):
        return False, Rule.LIST  # `x < 2 and x > 3` is no union
    answer, truth = as_list(answer, truth), as_list(truth, answer)
    if truth.items:
        return _compare_lists(answer, truth)
    if answer.items:
        same = not answer.brackets and all((compare(item, truth) or (False,))[0] for item in answer.items)
        return same, Rule.LIST if same else Rule.HEDGE
    if answer.number is not None and "." in answer.body and not _PATTERNS["rational"].fullmatch(truth.body):
        return False, Rule.NUMBER  # a decimal is not an exact form: 1.414 is not \\sqrt{2}
    return None


def is_equation(truth: Answer) -> bool:
    """`x^2+y^2 = 1` asks for a curve; `x = 1`, `AB = 1` and `f(2) = 1` for a number."""
    bare = _PATTERNS["command"].sub("", truth.text.partition("=")[0]).replace(" ", "")
    named = "=" in truth.text and not _PATTERNS["call"].fullmatch(truth.name)
    return named and _PATTERNS["unknowns"].fullmatch(bare) is not None


def as_list(answer: Answer, other: Answer) -> Answer:
    """An inequality as an interval, a column as a tuple, where the other answer is written as one."""
    if answer.brackets or other.brackets not in ("()", "(]", "[)", "[]") or len(answer.text) > _INEQUALITY_LIMIT:
        return answer
    listed = _listed(upwards(answer.text))
    return read(listed) if listed[:1] in ("(", "[") and listed[-1] in ")]" else answer


def _same_text(answer: Answer, truth: Answer) -> bool:
    if not _names_agree(answer, truth):
        return False
    given, wanted = (compact(_PATTERNS["article"].sub("", each.text)) for each in (answer, truth))
    word = _PATTERNS["word"].fullmatch(answer.text)
    texts = (wanted, _PATTERNS["base"].sub("", wanted))
    if given and (given in texts or (word and wanted in map(compact, filter(None, word.groups())))):
        return True
    return bool(answer.name) and compact(answer.body) == wanted


def _names_agree(answer: Answer, truth: Answer) -> bool:
    """`y = 3` is not `x = 3`, nor `a_2 = 3` `a_1 = 3`. A left side of another length, or without a letter, is taken for
    a derivation, not for a name; one in another order (`x + y`) for the same."""
    derived = len(answer.name) != len(truth.name) or not any(map(str.isalpha, answer.name))
    return derived or sorted(answer.name) == sorted(truth.name)


def _compare_lists(answer: Answer, truth: Answer) -> tuple[bool, Rule] | None:
    if len(answer.items) != len(truth.items):
        # one item, or one equation that algebra may still recognise, against several
        return (False, Rule.LIST) if answer.items or answer.number is not None else None
    if answer.brackets and truth.brackets and answer.brackets != truth.brackets:
        return False, Rule.LIST
    repeated = {item.name for item in answer.items} == {answer.items[0].name} != {""}
    within = answer.brackets and _PATTERNS["within"].match(answer.text)
    if (repeated and truth.brackets == "()") or (within and not truth.brackets):
        return False, Rule.LIST  # `x = 1, x = 2` is no point, `x \in (1, 2)` no list
    bracketed = set(truth.brackets) & set("[]") or (truth.brackets == "()" and "\\infty" in truth.text)
    if len(truth.items) == 2 and bracketed and not answer.brackets:
        return False, Rule.LIST  # `0, 1` does not say which ends of an interval belong to it
    given, asked = by_name(answer.items), by_name(truth.items)
    # Values alone stand in the order asked.
    asked = truth.items if not given[0].name and "(" in asked[0].name else asked
    names = {item.name for item in (*given, *asked)}
    if len(names - {""}) > 1 and bool(_PATTERNS["or"].search(answer.text)) != bool(_PATTERNS["or"].search(truth.text)):
        return False, Rule.LIST
    unordered = truth.brackets in ("", "{}") and answer.brackets in ("", "{}") and len(names - {""}) <= 1
    undecided, remaining = False, list(given)
    for wanted in asked:
        verdicts = [compare(item, wanted) for item in (remaining if unordered else remaining[:1])]
        match = next((i for i, verdict in enumerate(verdicts) if verdict is not None and verdict[0]), None)
        if match is None:
            if not any(verdict is None for verdict in verdicts):
                return False, Rule.LIST
            undecided, match = True, verdicts.index(None)
        del remaining[match]
    return None if undecided else (True, Rule.LIST)


def by_name(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """`y=2, x=1` as `x=1, y=2`, also `f(2)=0, f(1)=1`; of one unknown (`x_1=2, x_2=1`) without their numbering."""
    names = [item.name for item in items]
    roots = {_PATTERNS["index"].sub("", name) for name in names}
    if len(roots) == 1 and roots != {""}:
        return tuple(replace(item, name=min(roots)) for item in sorted(items, key=lambda item: item.name))
    if len(set(names)) == len(names) and _PATTERNS["sortable"].fullmatch("\n".join(names)):
        backwards = "".join(sorted(names)) in ("bm", "kn")  # a slope stands before an intercept, n before k
        return tuple(sorted(items, key=lambda item: item.name, reverse=backwards))
    return items
